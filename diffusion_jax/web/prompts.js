// Suggested prompts, from the model's config and its training captions, and a hint about words that
// occur in no training caption.

import {element} from "/plots.js";
import {$, post} from "/results.js";

const CHIPS = 3, LISTED = 100;
let suggested = "", model = null, timer;

const pick = (list) => list[Math.floor(Math.random() * list.length)];
const known = () => [...new Set([...model.prompts, ...model.examples])];

function use(prompt) {
  $("prompts").value = prompt;
  check();
}

// Show the suggested prompts of a model. If the user has not typed a prompt, enter the first one.
export function showPrompts(shown) {
  model = shown;
  const own = known();
  if (["", suggested].includes($("prompts").value)) $("prompts").value = suggested = own[0] ?? "";
  $("chips").replaceChildren(...own.slice(0, CHIPS).map((prompt) => element("button",
    {type: "button", class: "chip", title: prompt, onclick: () => use(prompt)}, prompt)));
  $("suggestions").hidden = !own.length;
  $("card").textContent = model.card;
  $("learned").hidden = !own.length;
  list();
  check();
}

function list() {
  const wanted = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = known().filter((prompt) => wanted.every((word) => prompt.toLowerCase().includes(word)));
  $("found").replaceChildren(...found.slice(0, LISTED).map((prompt) => element("li", {},
    element("button", {type: "button", class: "chip", onclick: () => use(prompt)}, prompt))));
  $("count-found").textContent = found.length > LISTED ? `${LISTED} of ${found.length} shown`
    : `${found.length} found`;
}

export function check() {
  clearTimeout(timer);
  timer = setTimeout(() => mark().catch(() => {}), 200);
}

async function mark() {
  const text = $("prompts").value;
  const {words, meaningless} = await post("/api/words", {model: model.name, prompts: [text]});
  if (text !== $("prompts").value) return;
  const replaced = (word, other) => use(text.replace(new RegExp(`(?<![\\p{L}\\p{N}])${word}(?![\\p{L}\\p{N}])`, "giu"), other));
  $("unknown").replaceChildren(...Object.entries(words).map(([word, similar]) => element("span", {},
    ...(meaningless ? ["I do not know ", element("mark", {}, word)]
      : [element("mark", {}, word), " is new or rare in the training captions"]),
    similar.length ? "; similar: " : ". ", ...similar.map((other) => element("button",
      {type: "button", class: "chip", onclick: () => replaced(word, other)}, other)))));
}

export function listen() {
  $("prompts").addEventListener("input", check);
  $("search").addEventListener("input", list);
  $("surprise").addEventListener("click", () => {
    use(pick(known()));
    $("seed").value = Math.floor(Math.random() * 2 ** 31);
  });
  $("random").addEventListener("click", () => $("seed").value = Math.floor(Math.random() * 2 ** 31));
}
