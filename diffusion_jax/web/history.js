// The list of earlier drawings, which stays in the browser's storage when the page is reloaded. Each
// entry is a link that draws the same pictures again, with small copies of the first pictures.

import {element} from "/plots.js";
import {$} from "/results.js";

const KEY = "drawings", MOST = 40, SHOWN = 4, SIDE = 64;

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? [];
  } catch {  // Storage is forbidden, or holds something else.
    return [];
  }
}

function write(entries) {
  try {
    localStorage.setItem(KEY, JSON.stringify(entries));
  } catch {}  // Full or forbidden: the history ends with this visit.
}

function smaller(image) {
  const scale = Math.min(1, SIDE / Math.max(image.naturalWidth, image.naturalHeight));
  const canvas = Object.assign(document.createElement("canvas"),
    {width: Math.max(1, image.naturalWidth * scale), height: Math.max(1, image.naturalHeight * scale)});
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL();
}

// Add a finished drawing. `link` is its part of the URL, `words` are its prompts, and `images` are
// its loaded <img> elements.
export function add(link, words, images) {
  const entry = {link, words, copies: images.slice(0, SHOWN).map(smaller)};
  write([entry, ...read().filter((other) => other.link !== link)].slice(0, MOST));
  show();
}

export function show() {
  const entries = read();
  $("history").hidden = !entries.length;
  $("earlier").replaceChildren(...entries.map(({link, words, copies}) => element("li", {},
    element("a", {href: link, title: words},
      ...copies.map((src) => element("img", {src, alt: ""})), element("span", {}, words)))));
}

export function listen() {
  $("forget").addEventListener("click", () => {
    write([]);
    show();
  });
  show();
}
