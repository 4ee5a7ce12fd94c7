// The views of sweeps and of training, and the tabs that switch between views.
// A report (the page saved as one file) contains all data that it shows and has no drawing view.

import {element, plot, short} from "/plots.js";

export const $ = (id) => document.getElementById(id);
const frozen = JSON.parse($("kept")?.textContent ?? "null");  // The data of a report, by URL.

const LOST = "The server does not answer: is the command that opened this page still running?";
const reach = (path, request) => fetch(path, request).catch(() => { throw new Error(LOST); });
export const get = async (path) => frozen ? frozen[path] : answer(await reach(path));
export const post = async (path, body) => answer(await reach(path, {
  method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body ?? null)}));

async function answer(response) {
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

export function options(select, values, chosen) {
  select.replaceChildren(...values.map((value) => element("option", {value}, String(value))));
  if (chosen != null && values.map(String).includes(String(chosen))) select.value = chosen;
}

function table(rows, head) {
  return element("div", {class: "scroll"}, element("table", {},
    head ? element("thead", {}, element("tr", {}, ...head.map((h) => element("th", {scope: "col"}, h)))) : null,
    element("tbody", {}, ...rows.map(([first, ...rest]) => element("tr", {},
      element("th", {scope: "row"}, first), ...rest.map((cell) => element("td", {}, cell)))))));
}

// --- Sweeps -----------------------------------------------------------------------------------

const EVERY = "every score";
let results = null;

const named = (sweep) => `${sweep.run}: ${sweep.name}`;
const chosen = () => results.sweeps.filter((s) => ["all", named(s)].includes($("sweep").value));
const titled = (column) => results.metrics[column]?.label ?? column;

async function showSweeps() {
  results = await get("/api/sweeps");
  const names = results.sweeps.map(named);
  options($("sweep"), names.length > 1 ? ["all", ...names] : names, $("sweep").value);
  $("choice-of-sweeps").hidden = !names.length;
  $("damaged").replaceChildren(...results.damaged.map((line) => element("p", {class: "error"}, line)));
  if (names.length) showAxes();
  else $("sweep-plots").replaceChildren(element("p", {class: "empty"},
    "There are no sweeps yet. Run the command `evaluate` to make one."));
}

// Return {axis label: columns} for the columns of the chosen sweeps.
function axes() {
  const points = chosen().flatMap((sweep) => sweep.points), byAxis = {guidance: ["guidance"]};
  for (const [column, {axis}] of Object.entries(results.metrics))
    if (points.some((p) => column in p.scores)) (byAxis[axis] ??= []).push(column);
  return byAxis;
}

function showAxes() {
  const [x, ...others] = Object.keys(axes());
  options($("sweep-x"), [x, ...others], $("sweep-x").value);
  options($("sweep-y"), [EVERY, ...others], $("sweep-y").value);
  showSweep();
}

function showSweep() {
  const [x, y] = [$("sweep-x").value, $("sweep-y").value], byAxis = axes(), all = Object.keys(byAxis).slice(1);
  const lower = (axis) => results.metrics[byAxis[axis][0]].lower, distance = all.find(lower);
  const pairs = y !== EVERY ? [[x, y]] : all.filter((one) => one !== x).map((one) => [x, one]);
  // As in papers, plot a distance (such as FID) over a score that grows with guidance.
  if (y === EVERY && x === "guidance" && distance)
    pairs.unshift(...all.filter((one) => !lower(one)).map((one) => [one, distance]));
  $("sweep-plots").replaceChildren(...pairs.map(([across, up]) => figure(byAxis, across, up)));
  const unlike = chosen().length === results.sweeps.length ? results.unlike : [];
  $("unlike").replaceChildren(...unlike.map((line) => element("p", {class: "error"}, `Not comparable. ${line}`)));
  $("tables").replaceChildren(...chosen().flatMap(pointsTable));
  showPoint(...best(all.flatMap((axis) => byAxis[axis])));
}

// Return [sweep, point] for the point that other points beat least often, counted over all scores.
function best(columns) {
  const each = chosen().flatMap((sweep) => sweep.points.map((point) => [sweep, point]));
  const sign = (column) => results.metrics[column].lower ? 1 : -1;
  const better = (one, other, c) => sign(c) * (one.scores[c] - other.scores[c]) < 0;
  const beaten = ([, point]) => columns.reduce((sum, column) =>
    sum + each.filter(([, other]) => !(column in point.scores) || better(other, point, column)).length, 0);
  return each.map((one) => [beaten(one), one]).reduce((a, b) => b[0] < a[0] ? b : a)[1];
}

function figure(byAxis, x, y) {
  const [xs, ys] = [byAxis[x], byAxis[y]], lines = [];
  let number = -1;  // A line keeps its colour in figures whose scores some sweeps lack.
  for (const [a, b] of xs.flatMap((a) => ys.map((b) => [a, b]))) {
    for (const sweep of chosen()) for (const label of new Set(sweep.points.map((p) => p.label))) {
      number++;
      const own = sweep.points.filter((p) => p.label === label && a in p.scores && b in p.scores)
        .sort((one, other) => one.guidance - other.guidance);
      const words = [xs.length > 1 ? titled(a) : "", ys.length > 1 ? titled(b) : ""].filter(Boolean);
      if (own.length) lines.push({label, number, parts: [named(sweep), ...label.split(", "), ...words],
        points: own.map((p) => ({x: p.scores[a], y: p.scores[b], low: p.scores[`${b}_low`],
          high: p.scores[`${b}_high`], label: x === "guidance" ? "" : short(p.guidance),
          words: `${label}, guidance ${p.guidance}: ${titled(b)} ${score(p, b)}`,
          choose: () => choose(sweep, p)}))});
    }
  }
  const shared = (part) => lines.length > 1 && lines.every((line) => line.parts.includes(part));
  const names = lines.map((line) => line.parts.filter((part) => !shared(part)).join(", "));
  lines.forEach((line, n) => line.name = lines.length === 1 ? line.label
    : names.every(Boolean) ? names[n] : line.parts.join(", "));
  const bands = xs[0] === "clip_score" && ys[0] === "fid" ? frozen?.bands : [];
  return plot({title: x === "guidance" ? y : `${y} over ${x}`, x, y, lines, bands});
}

function score(point, column) {
  const ends = [point.scores[`${column}_low`], point.scores[`${column}_high`]];
  const [factor, unit] = results.metrics[column].share ? [100, " %"] : [1, ""];
  const shown = (value) => short(factor * value);
  const interval = ends[0] == null ? "" : ` (${shown(ends[0])} to ${shown(ends[1])}${unit})`;
  return shown(point.scores[column]) + unit + interval;
}

function pointsTable(sweep) {
  const own = [...new Set(sweep.points.flatMap((p) => Object.keys(p.drawn)))].slice(1);
  const columns = Object.keys(results.metrics).filter((c) => sweep.points.some((p) => c in p.scores));
  const rows = sweep.points.map((p) => [
    element("button", {type: "button", class: "picked", onclick: () => choose(sweep, p)}, p.drawn.guidance),
    ...own.map((name) => p.drawn[name] ?? ""), ...columns.map((c) => c in p.scores ? score(p, c) : "")]);
  return [element("h2", {}, named(sweep)), element("div", {class: "panel"},
    table(rows, ["guidance", ...own, ...columns.map(titled)]),
    sweep.share ? element("p", {class: "note"}, `Scoring took at most ${sweep.share} % of the time.`) : "")];
}

function choose(sweep, point) {
  showPoint(sweep, point);
  if ($("point").getBoundingClientRect().top > innerHeight - 100) $("point").scrollIntoView();
}

function showPoint(sweep, point) {
  const sheet = (src, words) => element("figure", {}, element("figcaption", {}, words),
    element("div", {class: "scroll"}, linked(element("img",
      {onload: limit, alt: `${words}: ${point.label}, guidance ${point.guidance}`}), src)));
  const columns = Object.keys(results.metrics).filter((c) => c in point.scores);
  const cards = Object.entries(point.cards).map(([name, card]) => element("details", {},
    element("summary", {}, `How it was scored: ${card.extractor ?? name}`), table(Object.entries(card))));
  $("point").replaceChildren(
    point.sheet ? sheet(point.sheet, "Drawn") : element("p", {class: "note"}, "The pictures of this point were not saved."),
    sweep.real ? sheet(sweep.real, "Real pictures") : "",
    element("div", {}, element("h2", {}, `${sweep.run}, ${point.label}, guidance ${point.guidance}`),
      table(columns.map((c) => [titled(c), score(point, c)])),
      point.choices && !frozen ? element("div", {class: "buttons"},
        element("button", {type: "button", onclick: () => drawLike(sweep, point)}, "Draw with these settings")) : "",
      ...cards));
}

function drawLike(sweep, point) {
  const query = new URLSearchParams({model: sweep.run, checkpoint: point.choices.checkpoint,
    ema: point.choices.ema});
  for (const [name, value] of Object.entries(point.choices)) query.set(`set.${name}`, value);
  location.hash = `#draw?${query}`;
}

// --- Training ---------------------------------------------------------------------------------

const last = (values) => values.at(-1);
const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
const TOTAL = /^heldout\/.*\/loss$/;
// Each row: the title, a function that selects metrics by key, whether the axis is logarithmic, and,
// for the note below the plot, a label and a function that reduces a curve to one number.
const FIGURES = [
  ["Loss", (key) => key === "loss", true, "Median", median],
  ["Loss by noise level", (key) => key.startsWith("loss/"), true],
  ["Held-out loss", (key) => TOTAL.test(key), true, "Last value", last],
  ["Images per second", (key) => key === "images_per_second", false, "Median", median],
  ["Skipped steps", (key) => key === "skipped", false],
  ["Norm of the gradient", (key) => key === "grad_norm", true],
  ["Learning rate", (key) => key === "lr", false]];
const LONG = 90;  // The table shows longer config values only in part at first.
const hiddenRuns = new Set();
let before = "", timer;

async function followTraining() {
  before = "";
  await showTraining();
  if (!frozen) timer = setInterval(() => document.hidden || showTraining().catch(() => {}), 3000);
}

const logged = (run) => run.live || Object.keys(run.curves).length > 0;

async function showTraining() {
  const now = await get("/api/training");
  const text = JSON.stringify(now);
  if (text === before) return;
  before = text;
  showRuns(now);
}

function showRuns(now) {
  const hours = (s) => s > 5400 ? `${(s / 3600).toFixed(1)} hours` : `${Math.ceil(s / 60)} minutes`;
  const shown = now.runs.filter((run) => !hiddenRuns.has(run.name));
  $("runs").replaceChildren(...now.runs.map((run) => element("div", {class: "run panel"},
    now.runs.length > 1 ? chooser(run.name, now) : element("strong", {}, run.name),
    run.continues ? element("span", {class: "note"}, `continues ${run.continues}`) : "",
    run.damage ? element("span", {class: "error"}, run.damage) : "",
    ...logged(run) ? [element("span", {}, `step ${run.step.toLocaleString("en")} of ${run.steps.toLocaleString("en")}`),
    element("progress", {max: run.steps || 1, value: run.step, "aria-label": `${run.name}: steps done`}),
    run.live && !frozen ? element("span", {class: "live"}, `training, ${hours(run.seconds)} left`)
      : element("span", {class: "note"}, run.step >= run.steps ? "finished" : "not running")]
      : [element("span", {class: "note"}, "a packed model, or a run that has not logged yet")])));
  $("curves").replaceChildren(...FIGURES.flatMap((one) => curves(now.names, shown, ...one)));
  $("times").replaceChildren(...shown.flatMap(times));
  showSamples(shown);
  const columns = now.names.map((name, n) => [name, n]).filter(([name]) => !hiddenRuns.has(name));
  const rows = now.differing.map((d) => [d.field, ...columns.map(([, n]) => d.values[n])])
    .filter(([, ...values]) => new Set(values).size > 1);
  $("differing").replaceChildren(...(rows.length ? [element("h2", {}, "How the configs differ"),
    element("div", {class: "panel"}, table(rows.map(([field, ...values]) => [field, ...values.map(shortened)]),
      ["field", ...columns.map(([name]) => name)]))] : []));
}

// Make a label with a run's name and a checkbox that shows or hides the run in this view.
function chooser(name, now) {
  const box = element("input", {type: "checkbox", "aria-label": `show ${name}`});
  box.checked = !hiddenRuns.has(name);
  box.addEventListener("change", () => {
    if (box.checked) hiddenRuns.delete(name);
    else hiddenRuns.add(name);
    showRuns(now);
  });
  return element("label", {class: "chosen"}, box, element("strong", {}, name));
}

function shortened(value) {
  const text = String(value);
  return text.length <= LONG ? text : element("details", {class: "long"},
    element("summary", {}, `${text.slice(0, LONG - 10)} ...`), text);
}

// Make a figure of the curves that fit. A run has one colour in all figures, and no other run has it.
function curves(names, runs, title, fits, log, words, number) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.curves).filter(fits)))];
  const lines = runs.flatMap((run) => Object.keys(run.curves).filter(fits).map((key) => ({
    run, number: names.indexOf(run.name) + names.length * keys.indexOf(key), name: [runs.length > 1 ? run.name : "", key.startsWith("loss/") ? key.slice(5).replaceAll("_", " ")
      : TOTAL.test(key) ? key.split("/")[1].replaceAll("_", " ") : ""].filter(Boolean).join(", "),
    points: run.curves[key].map(([x, y]) => ({x, y}))}))).filter((line) => line.points.length);
  const note = words && `${words}: ` + lines.map((line) =>
    `${line.name} ${short(number(line.points.map((p) => p.y)))}`.trim()).join(", ");
  return lines.length ? [plot({title, x: "step", y: title, lines, log, note})] : [];
}

// Return the table of how long each start of a run trained, compiled, saved and so on.
function times(run, _, shown) {
  if (!run.starts.length) return [];
  const clock = (s) => s >= 60 ? `${Math.floor(s / 3600)}:${String(Math.floor(s / 60) % 60).padStart(2, "0")}:${
    String(Math.floor(s % 60)).padStart(2, "0")}` : `${s.toFixed(1)} s`;
  const total = run.starts.at(-1).seconds, kinds = Object.keys(total).filter((kind) => total[kind]);
  const goodput = ({seconds: {steps = 0, "not running": idle, ...others}}) => {
    const whole = Object.values(others).reduce((a, b) => a + b, steps);
    return whole ? `${(100 * steps / whole).toFixed(1)} %` : "";
  };
  const rows = run.starts.map((start) => [start.name, start.steps, goodput(start),
    ...kinds.map((kind) => start.seconds[kind] ? clock(start.seconds[kind]) : "")]);
  return [element("h2", {}, shown.length > 1 ? `Where the time of ${run.name} went` : "Where the time went"),
    element("div", {class: "panel"}, table(rows, ["start (UTC)", "after step", "goodput", ...kinds]),
      element("p", {class: "note"}, "Goodput is the share of steps in the time that the run was running. Repeated: "
        + "steps that were taken after the last checkpoint of the start before, and again."))];
}

// Show a small picture at most at four times its size.
function limit(event) {
  const width = 4 * event.target.naturalWidth;
  Object.assign(event.target.style, {maxWidth: `${width}px`, minWidth: width < 640 ? "0" : ""});
}

// Show the picture `src` in an image inside a link. A small copy in a report names the file of the
// whole picture after "#", which the link opens.
function linked(image, src, link = element("a", {target: "_blank"}, image)) {
  const file = src.split("#")[1];
  image.src = src;
  if (file) link.href = file;
  else link.removeAttribute("href");
  return link;
}

function showSamples(runs) {
  const at = Object.fromEntries([...document.querySelectorAll("#over-time input")].map((i) => [i.id, i]));
  $("over-time").replaceChildren(...runs.flatMap((run, n) => {
    if (!run.samples.length) return [];
    const id = `samples-${n}`, end = run.samples.length - 1;
    const follows = !at[id] || at[id].value === at[id].max;
    const image = element("img", {alt: "", onload: limit}), label = element("span");
    const link = linked(image, run.samples[end][1]);
    const slider = element("input", {type: "range", id, min: 0, max: end, "aria-label": "Step",
      oninput: () => {
        const [step, source] = run.samples[Number(slider.value)];
        linked(image, source, link);
        image.alt = `Samples of ${run.name} at step ${step}`;
        label.textContent = `step ${step.toLocaleString("en")}`;
        slider.setAttribute("aria-valuetext", label.textContent);
      }});
    slider.value = follows ? end : at[id].value;
    slider.dispatchEvent(new Event("input"));
    return [element("h2", {}, `Samples of ${run.name} at fixed seeds, `, label),
      element("div", {class: "panel"}, slider, element("div", {class: "scroll"}, link))];
  }));
}

// --- Views ------------------------------------------------------------------------------------

const SHOW = {sweeps: showSweeps, training: followTraining};
const VIEWS = [...(frozen ? [] : ["draw"]), ...Object.keys(SHOW)];
const FIRST = frozen && !frozen["/api/sweeps"].sweeps.length ? "training" : VIEWS[0];

async function turn(view) {
  for (const name of VIEWS) {
    $(`view-${name}`).hidden = name !== view;
    $(`tab-${name}`).setAttribute("aria-selected", name === view);
    $(`tab-${name}`).tabIndex = name === view ? 0 : -1;
  }
  clearInterval(timer);
  try {
    await SHOW[view]?.();
  } catch (error) {
    $(`view-${view}`).prepend(element("p", {class: "error"}, error.message));
  }
}

// Set up the tabs and show the view that the URL names. `drawing` holds functions that make and
// follow URLs of drawings (see draw.js).
export async function open(title, drawing) {
  document.title = $("title").textContent = title;
  const follow = async () => {
    const [view, query] = location.hash.slice(1).split(/\?(.*)/s);
    const wanted = VIEWS.includes(view) ? view : FIRST;
    await turn(wanted);
    if (wanted === "draw") await drawing.follow(query);
  };
  $("sweep").addEventListener("change", showAxes);
  for (const id of ["sweep-x", "sweep-y"]) $(id).addEventListener("change", showSweep);
  for (const [n, view] of VIEWS.entries()) {
    const tab = $(`tab-${view}`);
    tab.addEventListener("click", () => {
      history.replaceState(null, "", view === "draw" ? drawing.hash() : `#${view}`);
      turn(view);
    });
    tab.addEventListener("keydown", ({key}) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[key];
      if (!step) return;
      const next = $(`tab-${VIEWS[(n + step + VIEWS.length) % VIEWS.length]}`);
      next.focus();
      next.click();
    });
  }
  window.addEventListener("hashchange", follow);
  await follow();
}

if (frozen) {
  for (const id of ["tab-draw", "view-draw", "detail"]) $(id).remove();
  open(frozen.title);
}
