// The values of a chart where the pointer is, or, with the arrow keys, of one point after another. Texts are set as texts, never as HTML.
for (const chart of document.querySelectorAll(".chart")) {
  const points = JSON.parse(chart.querySelector("script").textContent);
  const plot = chart.querySelector(".plot"), cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
  let at = points.x.length - 1;

  const element = (name, color, text) => {
    const made = document.createElement(name);
    if (color) made.className = "c" + color;
    made.textContent = text;
    return made;
  };

  const show = (point) => {
    at = Math.max(0, Math.min(points.x.length - 1, point));
    cursor.style.left = points.x[at] + "%";
    cursor.replaceChildren(...points.y.flatMap((heights, line) => {
      if (heights[at] === null) return [];
      const dot = element("b", points.colors[line], "");
      dot.style.top = heights[at] + "%";
      return [dot];
    }));
    tip.replaceChildren(element("strong", 0, points.head[at]), ...points.names.flatMap((name, line) => {
      if (points.texts[line][at] === null) return [];
      const row = element("div", points.colors[line], "");
      row.append(element("i", 0, ""), (points.names.length > 1 ? name + " " : "") + points.texts[line][at]);
      return [row];
    }));
    cursor.hidden = tip.hidden = false;
    const room = plot.clientWidth - tip.offsetWidth, left = plot.clientWidth * points.x[at] / 100;
    tip.style.left = Math.max(-46, Math.min(room, left - tip.offsetWidth / 2)) + "px";
  };

  const hide = () => { cursor.hidden = tip.hidden = true; };

  if (points.x.length) {
    plot.addEventListener("pointermove", (event) => {
      const frame = plot.getBoundingClientRect(), place = 100 * (event.clientX - frame.left) / frame.width;
      let nearest = 0;
      for (let point = 1; point < points.x.length; point++) {
        if (Math.abs(points.x[point] - place) < Math.abs(points.x[nearest] - place)) nearest = point;
      }
      show(nearest);
    });
    plot.addEventListener("pointerleave", hide);
    chart.addEventListener("focus", () => { if (chart.matches(":focus-visible")) show(at); });
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { show(at + step); event.preventDefault(); }
    });
  }
}
