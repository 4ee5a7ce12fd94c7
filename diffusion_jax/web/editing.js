// The form's picture: one to draw over, with a brush that paints the part to redraw, or one to
// enlarge. The server and the command `sample` read the same PNG files.

import {$, post} from "/results.js";

const LARGEST = 1024, MULTIPLE = 8;
let bitmap = null;  // The picture as the user chose it.
let picture = null, paint = null;  // Canvases: the scaled picture, and the paint on it.
let area = [];  // The part of the bitmap that the paint covers: left, top, width, height.
let names = null;  // The names of the uploaded picture and mask on the server.
let model = () => undefined;  // Returns the server's description of the chosen model.

const enlarging = () => Boolean(model()?.enlarger) && $("use").value === "enlarge";

const canvasOf = (width, height) => Object.assign(document.createElement("canvas"), {width, height});

async function read(file) {
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "this file"} is not a picture that the browser can read`);
  }
  paint = null;
  scale();
}

// Scale the picture to a size that the model can draw: a square, unless the model draws pictures of
// any height and width.
function scale() {
  const square = enlarging() || (model()?.square ?? true);
  const largest = enlarging() ? model().enlarger.side : LARGEST;
  const multiple = enlarging() ? model().enlarger.side : MULTIPLE;
  const side = Math.min(bitmap.width, bitmap.height);
  const [width, height] = square ? [side, side] : [bitmap.width, bitmap.height];
  const scale = Math.min(1, largest / Math.max(width, height));
  const fit = (n) => Math.max(multiple, Math.round(n * scale / multiple) * multiple);
  const left = (bitmap.width - width) / 2, top = (bitmap.height - height) / 2;
  picture = canvasOf(fit(width), fit(height));
  if (!enlarging()) movePaint(left, top, width, height);
  const context = picture.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, picture.width, picture.height);
  context.drawImage(bitmap, left, top, width, height, 0, 0, picture.width, picture.height);
  show();
}

// Put the paint on the picture, which now shows this part of the bitmap.
function movePaint(...next) {
  const old = paint, [x, y, width, height] = area;
  if (old && old.width === picture.width && old.height === picture.height
      && next.every((n, i) => n === area[i])) return;
  paint = canvasOf(picture.width, picture.height);
  area = next;
  const across = paint.width / next[2], down = paint.height / next[3];
  if (old) paint.getContext("2d").drawImage(old, (x - next[0]) * across, (y - next[1]) * down,
    width * across, height * down);
}

function mask() {
  const white = canvasOf(paint.width, paint.height), all = canvasOf(paint.width, paint.height);
  let context = white.getContext("2d");
  context.drawImage(paint, 0, 0);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, white.width, white.height);
  context = all.getContext("2d");
  context.fillRect(0, 0, all.width, all.height);
  context.drawImage(white, 0, 0);
  return all;
}

const painted = () => !enlarging() && paint.getContext("2d")
  .getImageData(0, 0, paint.width, paint.height).data.some((value, n) => n % 4 === 3 && value > 127);

function show() {
  names = null;
  const canvas = $("canvas");
  $("editing").hidden = !picture;
  if (!picture) return;
  canvas.width = picture.width;
  canvas.height = picture.height;
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  context.globalAlpha = 0.55;
  if (!enlarging()) context.drawImage(paint, 0, 0);
  $("save-image").href = picture.toDataURL();
  const masked = painted();
  $("save-mask").hidden = !masked;
  if (masked) $("save-mask").href = mask().toDataURL();
}

function brush(event) {
  if (!picture || enlarging() || !(event.buttons & 1)) return;
  const box = $("canvas").getBoundingClientRect(), scale = picture.width / box.width;
  const context = paint.getContext("2d");
  context.fillStyle = "#e0218a";
  context.beginPath();
  context.arc((event.clientX - box.left) * scale, (event.clientY - box.top) * scale,
    Number($("brush").value) * picture.width / 200, 0, 2 * Math.PI);
  context.fill();
  show();
}

// Upload the picture and the mask. Return the field `edit` of a drawing request, which names them.
export async function uploaded() {
  if (!picture && !names) return {};
  if (!names) {
    const send = async (canvas) => (await post("/api/pictures",
      {png: canvas.toDataURL("image/png").split(",")[1]})).picture;
    names = {image: await send(picture), mask: painted() ? await send(mask()) : ""};
  }
  if (enlarging()) return {image: names.image, enlarge: true};
  return {...names, strength: Number($("strength").value)};
}

export function inLink() {
  if (!names) return {};
  return enlarging() ? {image: names.image, enlarge: "yes"} : {...names, strength: $("strength").value};
}

export function fromLink(query) {
  if (!query.has("image")) return;
  [bitmap, picture, names] = [null, null, {image: query.get("image"), mask: query.get("mask") ?? ""}];
  $("use").value = query.has("enlarge") ? "enlarge" : "over";
  if (query.has("strength")) $("strength").value = query.get("strength");
  $("of-strength").textContent = $("strength").value;
  showUse();
}

function showUse() {
  for (const part of $("edit").querySelectorAll(".over")) part.hidden = enlarging();
  for (const part of $("edit").querySelectorAll(".enlarge")) part.hidden = !enlarging();
}

// Offer only the uses of a picture that the chosen model supports.
export function showModel() {
  const enlarger = model()?.enlarger;
  $("uses").hidden = !enlarger || enlarger.stage === 0;
  if (enlarger?.stage === 0) $("use").value = "enlarge";
  $("side").textContent = enlarger ? `${enlarger.side}x${enlarger.side}` : "";
  showUse();
  if (bitmap) scale();
}

// Let the user add a picture by a file dialog, or by dropping it on the form.
export function listen(chosen, say) {
  model = chosen;
  showModel();
  $("use").addEventListener("change", showModel);
  const take = (file) => file && read(file).then(() => $("edit").open = true)
    .catch((error) => say(error.message, true));
  $("picture").addEventListener("change", (event) => take(event.target.files[0]));
  $("form").addEventListener("dragover", (event) => event.preventDefault());
  $("form").addEventListener("drop", (event) => {
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  for (const name of ["pointerdown", "pointermove"]) $("canvas").addEventListener(name, brush);
  $("strength").addEventListener("input", () => $("of-strength").textContent = $("strength").value);
  $("clear").addEventListener("click", () => {
    paint?.getContext("2d").clearRect(0, 0, paint.width, paint.height);
    show();
  });
  $("remove").addEventListener("click", () => {
    bitmap = picture = paint = null;
    $("picture").value = "";
    show();
  });
}
