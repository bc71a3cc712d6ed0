// Reads the values under the pointer, in all plots at once. Without it the page loses nothing else.
"use strict";
const { samples: [first, last], curves } = JSON.parse(document.getElementById("data").textContent);
const figures = Array.from(document.querySelectorAll("figure"), (figure) => ({
  area: figure.querySelector(".area"),
  cursor: figure.querySelector(".cursor"),
  outputs: figure.querySelectorAll("output"),
  curves: curves[figure.id],
}));
function words(value) {
  if (value !== 0 && Math.abs(value) < 0.01) return value.toExponential(2);
  return value.toLocaleString("en", value < 1000 ? { maximumSignificantDigits: 4 }
                                                 : { maximumFractionDigits: 0 });
}

// The value of a curve at x: the last point before it where values hold, else the nearest point.
function at({ holds, points }, x) {
  let low = 0, high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle + 1; else high = middle;
  }
  const before = points[low - 1], after = points[low];
  if (holds || !after) return before?.[1];
  if (!before) return after[1];
  return (x - before[0] < after[0] - x ? before : after)[1];
}

function show(share) {
  const x = first + share * (last - first);
  document.getElementById("at").textContent = ` (at sample ${words(Math.round(x))})`;
  for (const { cursor, outputs, curves } of figures) {
    cursor.style.display = "block";
    cursor.style.left = `${100 * share}%`;
    outputs.forEach((output, nth) => {
      const value = at(curves[nth], x);
      output.textContent = value === undefined ? "" : words(value);
    });
  }
}

function hide() {
  document.getElementById("at").textContent = "";
  for (const { cursor, outputs } of figures) {
    cursor.style.display = "none";
    outputs.forEach((output) => { output.textContent = ""; });
  }
}

for (const { area } of figures) {
  area.addEventListener("pointermove", (event) => {
    const { left, width } = area.getBoundingClientRect();
    show(Math.min(1, Math.max(0, (event.clientX - left) / width)));
  });
  area.addEventListener("pointerleave", hide);
}
