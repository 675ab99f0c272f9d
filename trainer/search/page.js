// Asks for the nearest pictures while a text is typed. Names are set as texts, never as HTML.
const STEP = 24, MOST = 480, PAUSE_MS = 200;
const field = document.querySelector("#text"), state = document.querySelector("#state");
const list = document.querySelector("#results"), more = document.querySelector("#more");
const hint = state.textContent, total = Number(document.body.dataset.total);
let count = STEP, request = new AbortController(), timer;

const say = (text, failed = false) => {
  state.textContent = text;
  state.classList.toggle("failed", failed);
};

const element = (name, ...inside) => {
  const made = document.createElement(name);
  made.append(...inside);
  return made;
};

const shown = ({ number, name, similarity }) => {
  const image = document.createElement("img"), link = element("a");
  image.src = `thumbnail/${number}`;
  image.alt = "";
  image.loading = "lazy";
  image.addEventListener("error", () => { image.alt = "This picture has been removed or changed."; });
  link.href = `picture/${number}`;
  link.target = "_blank";
  link.rel = "noopener";
  link.title = "Similarity of text and picture: the cosine of their features, at most 1";
  link.append(image, element("div", element("span", name), element("b", similarity.toFixed(3))));
  return element("li", link);
};

const search = async () => {
  const text = field.value.trim();
  request.abort();
  request = new AbortController();
  history.replaceState(null, "", text ? `#${encodeURIComponent(text)}` : location.pathname);
  more.hidden = true;
  if (!text) {
    list.replaceChildren();
    return say(hint);
  }
  const { signal } = request;
  try {
    const answer = await fetch(`search?text=${encodeURIComponent(text)}&count=${count}`, { signal });
    const { error, results = [] } = await answer.json();
    if (signal.aborted) return;
    list.replaceChildren(...results.map(shown));
    more.hidden = results.length < count || count >= Math.min(total, MOST);
    say(error || `The nearest ${results.length.toLocaleString("en")} of ${total.toLocaleString("en")} pictures, nearest first.`, Boolean(error));
  } catch (problem) {
    if (signal.aborted) return;
    list.replaceChildren();
    say("No answer: the search has ended in its terminal. Start clipship search again and open its new address.", true);
  }
};

const begin = () => {
  clearTimeout(timer);
  count = STEP;
  return search();
};

field.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(begin, PAUSE_MS);
});
more.addEventListener("click", async () => {
  const next = list.children.length;
  count = Math.min(count + STEP, MOST);
  await search();
  list.children[next]?.querySelector("a").focus();
});

// The picture above or below is the one at the same place of the next row that has one.
const neighbour = (links, at, key) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (step) return links[at + step];
  const down = key === "ArrowDown", left = links[at].offsetLeft, top = links[at].offsetTop;
  const ahead = down ? links.slice(at + 1) : links.slice(0, at).reverse();
  return ahead.find((link) => link.offsetLeft === left && link.offsetTop !== top) ?? (down ? undefined : field);
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const links = [...list.querySelectorAll("a")], at = links.indexOf(document.activeElement);
  let target;
  if (event.key === "Enter" && document.activeElement === field) begin();
  if (event.key === "/" && document.activeElement !== field) target = field;
  if (event.key === "Escape") {
    field.value = "";
    begin();
    target = field;
  }
  if (event.key === "ArrowDown" && document.activeElement === field) target = links[0];
  if (event.key.startsWith("Arrow") && at >= 0) target = neighbour(links, at, event.key);
  if (!target) return;
  event.preventDefault();
  target.focus();
});

const asked = () => {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
};
const fromAddress = () => {
  field.value = asked();
  begin();
};
addEventListener("hashchange", fromAddress);
if (location.hash) fromAddress();
