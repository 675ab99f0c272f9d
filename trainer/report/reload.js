
// A page about a run that goes on loads itself again. What was opened stays open; nothing is loaded while somebody reads a value.
const read = () => { try { return JSON.parse(sessionStorage.getItem(location.pathname)) || {}; } catch { return {}; } };
const opened = read(), names = [...document.querySelectorAll("details")].map((one, at) => [one, at + " " + one.querySelector("summary").textContent]);
for (const [one, name] of names) {
  if (name in opened) one.open = opened[name];
}
const again = () => {
  if (document.visibilityState !== "visible" || document.querySelector(".tip:not([hidden])")) return;
  try { sessionStorage.setItem(location.pathname, JSON.stringify(Object.fromEntries(names.map(([one, name]) => [name, one.open])))); } catch { /* then they close */ }
  location.reload();
};
setInterval(again, 1000 * document.documentElement.dataset.reload);
