// The form's fields for a model's settings: inputs, sliders, and one field per stage of a cascade.

import {element} from "/plots.js";

const SLIDERS = {guidance: [0, 10, 0.5], steps: [1, 100, 1]};  // Smallest, largest, step.

// Make the form's input for a setting. `stages` holds the names of the model's stages. `changed` is
// called after each change.
export function field(one, stages, changed) {
  const id = `field-${one.name}`, label = one.name.replaceAll("_", " ");
  if (stages.length > 1 && SLIDERS[one.name]) return perStage(one, stages, id, label, changed);
  let input;
  if (one.kind === "switch") {
    input = element("select", {id}, element("option", {value: "true"}, "yes"),
      element("option", {value: "false"}, "no"));
  } else if (one.options.length && ["grid", "end"].includes(one.name)) {
    input = element("select", {id}, element("option", {value: ""}, "the sampler's default"),
      ...one.options.map((value) => element("option", {value}, value)));
  } else {
    const list = one.options.length ? `${id}-names` : null;
    const numeric = ["number", "whole"].includes(one.kind);
    input = element("input", {id, list, inputmode: numeric ? "decimal" : null});
    if (list) input.append(element("datalist", {id: list},
      ...one.options.map((value) => element("option", {value, label: one.about[value] || value}))));
  }
  input.value = String(one.value);
  input.addEventListener("input", changed);
  const names = input.querySelector?.("datalist");
  const slider = SLIDERS[one.name] && sliderOf(input, label, ...SLIDERS[one.name]);
  return element("label", {title: one.help}, label, input, names, slider || null);
}

// Make one number field per stage of a cascade. A hidden field holds all numbers, separated by
// commas.
function perStage(one, stages, id, label, changed) {
  const whole = element("input", {id, type: "hidden"}), range = SLIDERS[one.name];
  const inputs = stages.map(() => element("input", {inputmode: "decimal"}));
  const sliders = inputs.map((input, n) => sliderOf(input, `${label} of ${stages[n]}`, ...range));
  const labels = inputs.map((input, n) => element("label", {class: "stage", title: one.help},
    `${label} of ${stages[n]}`, input, sliders[n]));
  const follow = () => {  // Show the numbers of the hidden field, which a link may have changed.
    const parts = whole.value.split(",");
    inputs.forEach((input, n) => input.value = sliders[n].value = (parts[n] ?? parts[0]).trim());
  };
  for (const input of inputs) input.addEventListener("input", () => {
    whole.value = inputs.map((each) => each.value.trim()).join(", ");
    changed();
  });
  whole.addEventListener("input", () => { follow(); changed(); });
  whole.value = String(one.value);
  follow();
  return element("div", {class: "wide"}, whole, ...labels);
}

function sliderOf(input, label, min, max, step) {
  const slider = element("input", {type: "range", min, max, step, "aria-label": `${label} slider`});
  const follow = () => slider.value = input.value;
  slider.addEventListener("input", () => {
    input.value = slider.value;
    input.dispatchEvent(new Event("input"));
  });
  input.addEventListener("input", follow);
  follow();
  return slider;
}
