// Plots as SVG: lines whose points can be chosen by mouse and keyboard.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 400, HEIGHT = 260, LEFT = 56, RIGHT = 16, TOP = 14, BOTTOM = 44;
const DASHES = ["", "7 4", "2 4", "9 3 2 3"];

export function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "circle", "text", "title"].includes(name);
  const node = svg ? document.createElementNS(NS, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

// Return the colour of line n: hues at multiples of the golden angle, in three lightnesses.
export function colour(n) {
  return `hsl(${(211 + 137.508 * n) % 360} 62% ${[47, 40, 56][Math.floor(n / 7) % 3]}%)`;
}

export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e5 || (size && size < 1e-3)) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, log) {
  if (log) {
    const marks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of [1, 2, 5]) marks.push(digit * 10 ** power);
    const inside = marks.filter((mark) => mark >= low && mark <= high);
    if (inside.length > 1) return inside.length > 7 ? inside.filter((_, i) => i % 3 === 0) : inside;
  }
  const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
  const marks = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) marks.push(at);
  return marks;
}

function scale(values, from, to, log) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    if (low === high) [low, high] = [low / 2, high * 2];
    const at = (value) => from + (to - from) * Math.log(value / low) / Math.log(high / low);
    return Object.assign(at, {marks: ticks(low, high, true)});
  }
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low - margin, high + margin];
  const at = (value) => from + (to - from) * (value - low) / (high - low);
  return Object.assign(at, {marks: ticks(low, high, false)});
}

// Make a figure. lines: [{name, number, points: [{x, y, low, high, label, words, choose}]}], where
// `number` selects the line's colour, `words` describes a point and choose() is called when it is
// chosen; bands: [{name, x, low, high}].
export function plot({title, x, y, lines, bands = [], log = false, note = ""}) {
  lines = lines.map((line) => ({...line, points: line.points.filter((p) => !log || p.y > 0)}))
    .filter((line) => line.points.length);
  const every = lines.flatMap((line) => line.points);
  if (!every.length) return element("p", {class: "note"}, "There is no data yet.");
  const across = scale(every.map((p) => p.x), LEFT, WIDTH - RIGHT, false);
  const ends = every.flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y]);
  const up = scale(ends, HEIGHT - BOTTOM, TOP, log);
  const svg = element("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group",
    "aria-label": `${y} over ${x}`});
  const axis = element("g", {class: "axis"});
  for (const mark of across.marks) {
    axis.append(element("line", {x1: across(mark), x2: across(mark), y1: TOP, y2: HEIGHT - BOTTOM}),
      element("text", {x: across(mark), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle"}, short(mark)));
  }
  for (const mark of up.marks) {
    axis.append(element("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: up(mark), y2: up(mark)}),
      element("text", {x: LEFT - 7, y: up(mark) + 4, "text-anchor": "end"}, short(mark)));
  }
  axis.append(element("text", {x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle"}, x));
  svg.append(axis);
  const inside = (value, low, high) => Math.max(low, Math.min(high, value)).toFixed(1);
  for (const band of bands) {
    const side = (ends) => band.x.map((at, n) =>
      `${inside(across(at), LEFT, WIDTH - RIGHT)} ${inside(up(ends[n]), TOP, HEIGHT - BOTTOM)}`);
    svg.append(element("path", {class: "band", d: `M${[...side(band.low), ...side(band.high).reverse()].join("L")}Z`}));
  }
  const hits = element("g");  // Click targets are drawn above all lines.
  for (const line of lines) svg.append(drawn(line, line.number, across, up, hits));
  svg.append(hits);
  const legend = element("ul", {class: "legend"}, ...lines.map((line) => element("li", {},
    element("svg", {viewBox: "0 0 26 10", "aria-hidden": "true"}, stroke("M1 5H25", line.number)), line.name)),
  ...bands.map((band) => element("li", {}, element("svg", {viewBox: "0 0 26 10", "aria-hidden": "true"},
    element("path", {class: "band", d: "M0 0H26V10H0Z"})), band.name)));
  return element("figure", {class: "plot"}, element("figcaption", {}, title ?? y), svg,
    lines.length > 1 || lines[0].name ? legend : null, note ? element("p", {class: "note"}, note) : null);
}

function stroke(d, n) {
  return element("path", {d, fill: "none", stroke: colour(n), "stroke-width": 2,
    "stroke-dasharray": DASHES[Math.floor(n / 8) % 4], "stroke-linejoin": "round"});
}

function drawn(line, n, across, up, hits) {
  const at = (p) => `${across(p.x).toFixed(1)} ${up(p.y).toFixed(1)}`;
  const group = element("g", {}, stroke("M" + line.points.map(at).join("L"), n));
  for (const point of line.points) {
    const [cx, cy] = [across(point.x), up(point.y)];
    if (point.low != null) {
      group.append(element("line", {x1: cx, x2: cx, y1: up(point.low), y2: up(point.high),
        stroke: colour(n), "stroke-opacity": 0.35, "stroke-width": 1.5}));
    }
    if (point.label) group.append(element("text", {x: cx + 7, y: cy - 7}, point.label));
    if (!point.choose) continue;
    const press = (event) => {
      if (event.type === "keydown" && !["Enter", " "].includes(event.key)) return;
      event.preventDefault();
      for (const other of document.querySelectorAll(".hit[aria-pressed=true]"))
        other.setAttribute("aria-pressed", "false");
      hit.setAttribute("aria-pressed", "true");
      point.choose();
    };
    const hit = element("g", {class: "hit", tabindex: 0, role: "button", "aria-pressed": "false",
      "aria-label": point.words, onclick: press, onkeydown: press},
      element("title", {}, point.words),
      element("circle", {cx, cy, r: 13, fill: "transparent"}),
      element("circle", {class: "dot", cx, cy, r: 5, fill: colour(n)}));
    hits.append(hit);
  }
  return group;
}
