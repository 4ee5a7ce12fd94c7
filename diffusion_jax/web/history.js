// The drawings that this browser requested, kept when the page is loaded again. Each is a link that
// draws the same pictures, with small copies of the first ones.

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

// Add a finished drawing. `images` are its loaded <img> elements, `link` its part of the URL.
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
