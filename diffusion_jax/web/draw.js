// The drawing view: a form, live previews, and grids that compare two settings.
// The part of the URL after # holds the whole form, so that a link draws the same pictures again.

import {element, short} from "/plots.js";
import * as editing from "/editing.js";
import {field} from "/fields.js";
import * as earlier from "/history.js";
import * as prompts from "/prompts.js";
import {$, get, open, options, post} from "/results.js";

const MAIN = ["guidance", "steps", "sampler", "negative_prompt"];
const WAIT = 3000;  // Milliseconds between requests while a model has no checkpoint.
const AUTOMATIC = 16;  // A link to at most this many pictures draws them without a click.
const WITHOUT = "Without a prompt";
let models = [], job = null;

// --- The form ---------------------------------------------------------------------------------

const model = () => models.find((one) => one.name === $("model").value) ?? models[0];
const control = (name) => $(`field-${name}`);

function marked() {
  const changed = model().fields.filter((one) => control(one.name).value !== String(one.value));
  for (const one of model().fields) control(one.name).classList.toggle("changed", changed.includes(one));
  const words = changed.map((one) => `${one.name.replaceAll("_", " ")} ${control(one.name).value || "none"}`);
  $("words").textContent = [model().words, words.join(", ")].filter(Boolean).join(". Changed: ");
}

function showModel() {
  const one = model();
  options($("checkpoint"), one.checkpoints.length ? one.checkpoints : ["-"], one.checkpoint);
  if (one.in_memory && one.checkpoint) $("checkpoint").selectedOptions[0].textContent += " (in memory)";
  options($("ema"), one.averages.length ? one.averages : ["ema"], one.average);
  $("checkpoint").closest("label").hidden = !one.checkpoints.length || one.stages.length > 1;
  $("ema").closest("label").hidden = !one.averages.length;
  const of = (wanted) => one.fields.filter((f) => MAIN.includes(f.name) === wanted);
  const shown = (f) => field(f, one.stages, marked);
  $("main-fields").replaceChildren(...of(true).map(shown));
  $("more-fields").replaceChildren(...of(false).map(shown));
  const axes = ["", "checkpoint", "ema", ...one.fields.map((f) => f.name), "prompt"];
  for (const id of ["x", "y"]) {
    options($(id), axes);
    $(id).options[0].textContent = "nothing";
    $(id).querySelector("[value=ema]").textContent = "average";
  }
  marked();
  $("prompts").required = one.needs_prompt;
  prompts.showPrompts(one);
  editing.showModel();
}

function typed(name, text) {
  const one = model().fields.find((f) => f.name === name);
  if (name === "checkpoint") return Number(text);
  const parts = text.split(",").map((part) => part.trim());
  if (!one || one.kind === "text" && !parts.every((part) => one.options.includes(part))) return text;
  if (one.kind === "switch") return text === "true";
  return model().stages.length > 1 && parts.length > 1 ? parts : text.trim();
}

function choices() {
  const one = model(), chosen = {};
  if (one.checkpoints.length) {
    chosen.ema = $("ema").value;
    if (one.stages.length === 1) chosen.checkpoint = Number($("checkpoint").value);
  }
  for (const f of one.fields) {
    const text = control(f.name).value, always = one.stages.length === 1 && MAIN.includes(f.name);
    if (always || text !== String(f.value)) chosen[f.name] = typed(f.name, text);
  }
  return chosen;
}

const typedLines = () => $("prompts").value.split("\n").map((line) => line.trim()).filter(Boolean);
const lines = () => typedLines().length || model().needs_prompt ? typedLines() : [""];

// The values of an axis. Commas separate them, too, unless a value may hold one: the text of a
// prompt, the parameters in (), and the numbers of a cascade's stages.
function values(id) {
  if (!$(id).value) return [""];
  const text = $(`${id}-values`).value, one = model().fields.find((f) => f.name === $(id).value);
  const whole = text.includes(";") || $(id).value === "prompt" || model().stages.length > 1
    || one?.kind === "text" && !one.options.length;
  return text.split(whole ? ";" : /,(?![^(]*\))/).map((value) => value.trim()).filter(Boolean);
}

// A seed has 64 bits, more than a number holds.
const whole = (text) => BigInt(/^\d+$/.test(text) ? text : Math.trunc(Number(text)));

function requested() {
  const count = Number($("count").value), first = whole($("seed").value);
  const seeds = Array.from({length: count}, (_, n) => first + BigInt(n)), wanted = [];
  const set = (picture, axis, value) => {
    if (!axis) return picture;
    if (axis === "prompt") return {...picture, prompt: picture.prompt.replace("*", value)};
    return {...picture, choices: {...picture.choices, [axis]: typed(axis, value)}};
  };
  const grid = Boolean($("x").value || $("y").value);
  for (const [n, prompt] of lines().entries()) {
    const own = grid ? seeds : seeds.map((seed) => seed + BigInt(n * count));
    for (const y of values("y")) for (const x of values("x")) for (const seed of own) {
      const picture = set({model: model().name, prompt, seed: `${seed}`, choices: choices()}, $("x").value, x);
      wanted.push({x, y, line: n, ...set(picture, $("y").value, y)});
    }
  }
  return wanted;
}

// --- Links ------------------------------------------------------------------------------------

const IN_LINK = ["model", "checkpoint", "ema", "count", "seed", "x", "x-values", "y", "y-values"];

function hash(changes = {}) {
  const query = new URLSearchParams();
  for (const id of IN_LINK) {
    const value = id in changes ? changes[id] : $(id).value;
    if (value !== "" && value !== "-") query.set(id, value);
  }
  for (const line of changes.prompts ?? lines()) query.append("prompt", line);
  const chosen = changes.choices ?? choices();
  for (const [name, value] of Object.entries(chosen)) {
    if (!IN_LINK.includes(name)) query.set(`set.${name}`, value);
  }
  for (const [name, value] of Object.entries(editing.inLink())) if (value) query.set(name, value);
  return `#draw?${query}`;
}

function restore(query) {
  if (query.has("model")) $("model").value = query.get("model");
  if (!$("model").value) throw new Error(`this page has no model ${query.get("model")}`);
  showModel();
  for (const id of IN_LINK.slice(1)) if (query.has(id)) $(id).value = query.get(id);
  if (query.has("prompt")) $("prompts").value = query.getAll("prompt").join("\n");
  for (const [key, value] of query) {
    const input = key.startsWith("set.") && control(key.slice(4));
    if (!input) continue;
    input.value = value;
    input.dispatchEvent(new Event("input"));
  }
  $("grid").open = Boolean($("x").value || $("y").value);
  editing.fromLink(query);
  prompts.check();
  marked();
}

// --- Drawing ----------------------------------------------------------------------------------

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", wrong);
}

async function draw(event) {
  event?.preventDefault();
  if (job) await cancel();
  const wanted = requested();
  say("Sending the request");
  try {
    const edit = await editing.uploaded();
    history.replaceState(null, "", hash());
    const sent = wanted.map(({model, prompt, seed, choices}) => ({model, prompt, seed, choices, edit}));
    const answer = await post("/api/draw", sent);
    wanted.forEach((picture, n) => Object.assign(picture, answer.pictures[n], {edit}));
    layOut(wanted);
    watch(answer.job, wanted, hash());
  } catch (error) {
    say(error.message, true);
  }
  if (innerWidth < 800) $("results").scrollIntoView();  // Now the frames have a height.
}

async function cancel() {
  const ending = job;
  if (!ending) return;
  await post(`/api/jobs/${ending.name}/cancel`);
  await ending.ended;
}

function watch(name, wanted, link) {
  const source = new EventSource(`/api/jobs/${name}`);
  let finished;
  const mine = {name, ended: new Promise((resolve) => finished = resolve)};
  job = mine;
  $("cancel").disabled = false;
  $("progress").hidden = false;
  $("progress").value = 0;
  $("save-all").hidden = true;
  source.onmessage = ({data}) => {
    const now = JSON.parse(data), total = wanted.length, done = now.drawn.length;
    for (const n of now.drawn) show(wanted[n], wanted[n].url, false);
    for (const [n, look] of Object.entries(now.looks))
      if (!now.drawn.includes(Number(n))) show(wanted[n], `data:image/png;base64,${look}`, true);
    $("progress").value = done / total;
    const looking = Object.keys(now.looks).length;
    say({waiting: now.ahead ? `Waiting for ${now.ahead} earlier ${now.ahead === 1 ? "job" : "jobs"}` : "Waiting",
      drawing: looking ? `Drawing: ${done} of ${total} done, noise level ${short(now.level)}`
        : `Drawing: ${done} of ${total} done (new settings must be compiled first)`,
      done: `${total} ${total === 1 ? "picture" : "pictures"}`,
      cancelled: `Cancelled: ${done} of ${total} done`, failed: now.error}[now.state],
    now.state === "failed");
    if (now.state === "done") finish(name, wanted, link);
    if (["done", "cancelled", "failed"].includes(now.state)) over();
  };
  source.onerror = () => {
    say("The connection to the server was lost", true);
    over();
  };
  const over = () => {
    source.close();
    if (job === mine) {
      job = null;
      $("cancel").disabled = true;
      $("progress").hidden = true;
      for (const blank of document.querySelectorAll("#pictures .blank")) blank.parentElement.remove();
      if (!document.querySelector(".picture")) $("pictures").replaceChildren();
    }
    finished();
  };
}

// After a drawing, offer its pictures as one file, and add it to the list of earlier drawings.
async function finish(name, wanted, link) {
  $("download").href = `/api/jobs/${name}.zip`;
  $("save-all").hidden = false;
  const images = wanted.map((picture) => picture.button.querySelector("img"));
  try {
    await Promise.all(images.map((image) => image.decode()));
  } catch {  // The server has dropped a picture, or the page shows other pictures.
    return;
  }
  const lines = [...new Set(wanted.map((picture) => picture.prompt))];
  earlier.add(link, lines.map((line) => line || WITHOUT).join("; "), images);
}

function frame(picture, words) {
  const blank = element("div", {class: "blank"});
  picture.button = element("button", {type: "button", class: "picture", "aria-busy": "true",
    "aria-label": `${picture.prompt}, seed ${picture.seed}`, onclick: () => detail(picture)},
  blank, element("span", {}, words));
  return picture.button;
}

function show(picture, source, busy) {
  if (picture.shown === source) return;
  picture.shown = source;
  const image = picture.button.querySelector("img") ?? element("img", {alt: picture.prompt});
  image.src = source;
  if (!image.isConnected) picture.button.firstChild.replaceWith(image);
  picture.button.setAttribute("aria-busy", busy);
}

function layOut(wanted) {
  const gridded = $("x").value || $("y").value;
  const groups = lines().map((line, n) => {
    const own = wanted.filter((picture) => picture.line === n);
    const body = gridded ? gridOf(own) : element("div", {class: "sheet"},
      ...own.map((picture) => frame(picture, `seed ${picture.seed}`)));
    return element("section", {class: "group"}, element("h2", {}, line || WITHOUT), body);
  });
  $("pictures").replaceChildren(...groups);
}

function gridOf(own) {
  const xs = [...new Set(own.map((p) => p.x))], ys = [...new Set(own.map((p) => p.y))];
  const name = (id, value) => $(id).value === "prompt" ? value : $(id).value
    ? `${$(id).selectedOptions[0].textContent.replaceAll("_", " ")} ${value}` : "";
  const row = (y) => element("tr", {}, element("th", {scope: "row"}, name("y", y)),
    ...xs.map((x) => element("td", {}, element("div", {class: "cell"},
      ...own.filter((p) => p.x === x && p.y === y).map((p) => frame(p, `seed ${p.seed}`))))));
  return element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Grid"},
    element("table", {class: "grid"},
      element("thead", {}, element("tr", {}, element("td"),
        ...xs.map((x) => element("th", {scope: "col"}, name("x", x))))),
      element("tbody", {}, ...ys.map(row))));
}

function detail(picture) {
  const one = models.find((m) => m.name === picture.model);
  const changes = {model: picture.model, prompts: [picture.prompt], seed: picture.seed, count: 1,
    x: "", y: "", "x-values": "", "y-values": "", choices: picture.choices};
  if (picture.choices.checkpoint) changes.checkpoint = picture.choices.checkpoint;
  if (picture.choices.ema) changes.ema = picture.choices.ema;
  const link = `${location.origin}${location.pathname}${hash(changes)}`;
  const done = picture.shown === picture.url;
  const stages = one.stages.slice(picture.edit.enlarge ? one.enlarger.stage : 0);
  const sizes = done ? stages.map((_, n) => picture.url.replace(".png", `/${n}.png`)) : [];
  const images = (sizes.length > 1 ? sizes : [picture.shown ?? ""])
    .map((src) => element("img", {src, alt: picture.prompt}));
  const file = `${picture.prompt.replace(/\W+/g, "_").slice(0, 60)}_${picture.seed}.png`;
  $("detail").replaceChildren(
    element("div", {class: images.length > 1 ? "pair" : ""}, ...images),
    element("h2", {}, picture.prompt || WITHOUT),
    element("p", {class: "note"}, [["seed", picture.seed], ...Object.entries(picture.choices)]
      .filter(([, value]) => value !== "")
      .map(([key, value]) => `${key === "ema" ? "average" : key.replaceAll("_", " ")} ${value}`)
      .join(", ")),
    element("p", {}, element("a", {href: link, target: "_blank", rel: "noopener"}, "Link to this picture"),
      done ? " · " : "", done ? element("a", {href: picture.url, download: file}, "Save as PNG") : ""),
    element("p", {class: "note"}, "To draw the same picture in a terminal:"),
    element("pre", {tabindex: 0}, picture.command),
    element("div", {class: "buttons"},
      element("button", {type: "button", onclick: () => copy(picture.command, "Command")}, "Copy command"),
      element("button", {type: "button", class: "primary", onclick: () => $("detail").close()}, "Close")));
  $("detail").showModal();
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied`);
  } catch {
    say(text);
  }
}

// --- Views ------------------------------------------------------------------------------------

async function follow(query) {
  if (!query || !models.length) return;
  try {
    restore(new URLSearchParams(query));
    const pictures = requested().length;
    if (pictures <= AUTOMATIC) await draw();
    else say(`This link requests ${pictures} pictures: press Draw to draw them`);
  } catch (error) {
    say(error.message, true);
  }
}

// Show the models that can draw. Repeat this until all models can draw.
async function showModels(answer) {
  const first = !models.length;
  models = answer.models;
  options($("model"), models.map((one) => one.name), $("model").value);
  $("draw").disabled = !models.length;
  $("waiting").replaceChildren(...answer.waiting.map(({why}) => element("p", {class: "hint"}, `${why}.`)));
  if (first && models.length) showModel();
  if (answer.waiting.length) {
    setTimeout(() => get("/api/models").then(showModels).catch(() => {}), WAIT);
  }
}

async function start() {
  const answer = await get("/api/models");
  await showModels(answer);
  prompts.listen();
  earlier.listen();
  editing.listen(model, say);
  $("model").addEventListener("change", showModel);
  $("form").addEventListener("submit", draw);
  $("cancel").addEventListener("click", cancel);
  $("link").addEventListener("click", () => copy(`${location.origin}${location.pathname}${hash()}`, "Link"));
  $("prompts").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });
  if (!models.length && !location.hash) location.hash = "#training";
  await open(answer.package, {hash: () => models.length ? hash() : "#draw", follow});
}

start().catch((error) => say(error.message, true));
