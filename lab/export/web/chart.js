// The chart of the score by mean layers on the held-out examples, as SVG.
const WIDTH = 460, HEIGHT = 240, LEFT = 56, RIGHT = 14, TOP = 28, BOTTOM = 44;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Draw the curve {score, points: [value, score, layers]} of a model with `layers` layers; a click calls choose(index). */
export function drawChart({ score, points, of }, layers, chosen, choose) {
  const scores = points.map((point) => point[1]);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const room = Math.max((high - low) * 0.1, 0.005);
  const x = (value) => LEFT + (value / layers) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low + room) / (high - low + 2 * room)) * (HEIGHT - TOP - BOTTOM);
  const label = (text, attributes) => svg("text", attributes, text);
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const chosenPoint = points[chosen] ? `; here ${points[chosen][1].toFixed(3)} at ${points[chosen][2].toFixed(2)} layers` : "";
  chart.append(svg("title", {}, `${score} by mean layers on ${of}${chosenPoint}`));
  chart.append(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  for (let layer = 0; layer <= layers; layer += Math.ceil(layers / 6)) {
    chart.append(label(layer, { x: x(layer), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }));
  }
  for (const value of new Set([low, (low + high) / 2, high])) {
    chart.append(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    chart.append(label(value.toFixed(3), { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }));
  }
  chart.append(label("mean layers", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }));
  chart.append(label(score, { x: 4, y: 14 }));
  chart.append(svg("polyline", { points: points.map(([, right, mean]) => `${x(mean)},${y(right)}`).join(" ") }));
  points.forEach(([, right, mean], number) => {
    const here = number === chosen;
    const point = svg("circle", { cx: x(mean), cy: y(right), r: here ? 7 : 4, class: here ? "point here" : "point" });
    point.addEventListener("click", () => choose(number));
    chart.append(point);
  });
  const here = chart.querySelector(".here");
  if (here) chart.append(here); // draw it above the others
  return chart;
}
