// The pane that makes images: the form, the image being made, and the gallery that this browser stores.

import { button } from "./dialogs.js";
import { element, icon, iconButton } from "./dom.js";
import { Drawing } from "./drawing.js";
import { randomId } from "./ids.js";
import { storageProblem } from "./store.js";

const NUM_PREVIEWS = 3; // the server's limit
const SIDES = [256, 512, 768, 1024]; // offered if the model supports them
const MAX_ALT = 200;

export class ImagesPane {
  // app: { api, store, imageModel(), canAskAbout(), askAbout(blob, name), announce(text) }
  constructor(app) {
    this.app = app;
    this.drawing = null;
    this.build();
    this.load();
  }

  build() {
    this.prompt = element("textarea", {
      id: "image-prompt",
      rows: 2,
      "aria-label": "Image",
      placeholder: "Describe an image",
      autocomplete: "off",
    });
    this.sizes = element("datalist", { id: "image-sizes" });
    this.size = field("size", "Size", { list: "image-sizes", placeholder: "auto" });
    this.steps = field("steps", "Steps", { inputmode: "numeric", placeholder: "default" });
    this.seed = field("seed", "Seed", { inputmode: "numeric", placeholder: "random" });
    this.draw = element("button", { type: "submit", class: "primary" }, "Draw");
    const form = element(
      "form",
      { class: "composer drawer", "aria-label": "Ask for an image" },
      this.prompt,
      element("div", { class: "tools" }, this.size.node, this.steps.node, this.seed.node, this.sizes, this.draw),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.drawing) this.stop();
      else this.start();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.drawing) this.start();
    });
    this.prompt.addEventListener("input", () => this.update());
    this.notice = element("p", { class: "wrong", role: "alert", hidden: true });
    this.easel = element("section", { class: "easel", "aria-label": "Being drawn", hidden: true });
    this.gallery = element("ul", { class: "gallery", "aria-label": "Images" });
    this.about = element("p", { class: "hint" });
    const column = element("div", { class: "column" }, form, this.about, this.notice, this.easel, this.gallery);
    this.node = element("div", { class: "images scrolling", tabindex: "-1" }, column);
  }

  focus() {
    if (!matchMedia("(pointer: coarse)").matches) this.prompt.focus();
  }

  modelChanged() {
    const model = this.app.imageModel();
    const limits = model?.limits;
    this.about.textContent = model ? `Drawn by ${model.id}. Images are kept in this browser alone.` : "";
    const fits = (side) =>
      !limits ||
      (side <= limits.max_side && side * side <= limits.max_pixels && side >= limits.min_side && side % limits.size_multiple === 0);
    const offered = new Set(["auto", ...SIDES.filter(fits).map((side) => `${side}x${side}`)]);
    if (limits) offered.add(limits.default_size);
    this.sizes.replaceChildren(...[...offered].map((value) => element("option", { value })));
    this.size.input.placeholder = limits ? limits.default_size : "auto";
    this.steps.input.placeholder = limits ? String(limits.default_steps) : "default";
    for (const view of this.gallery.querySelectorAll(".ask")) this.allowAsking(view);
    this.update();
  }

  tell(text) {
    this.notice.hidden = !text;
    this.notice.textContent = text ?? "";
  }

  update() {
    this.draw.textContent = this.drawing ? "Stop" : "Draw";
    this.draw.disabled = !this.drawing && (!this.prompt.value.trim() || !this.app.imageModel());
  }

  // Returns the body of the form's request; null, after telling the user, if the form is invalid.
  request() {
    const prompt = this.prompt.value.trim();
    const body = { model: this.app.imageModel().id, prompt, stream: true, partial_images: NUM_PREVIEWS, progress: true };
    const size = this.size.input.value.trim();
    if (size) body.size = size;
    for (const { input, name, label } of [this.steps, this.seed]) {
      const text = input.value.trim();
      if (!text) continue;
      if (!/^\d{1,15}$/.test(text)) {
        this.tell(`${label} is ${text.slice(0, 40)}, expected a whole number`);
        input.focus();
        return null;
      }
      body[name] = Number(text);
    }
    return body;
  }

  async start() {
    if (!this.prompt.value.trim() || !this.app.imageModel()) return;
    this.tell(null);
    const body = this.request();
    if (!body) return;
    const drawing = new Drawing({ api: this.app.api, body, onChange: () => this.showDrawing(drawing) });
    this.drawing = drawing;
    this.showDrawing(drawing);
    const images = await drawing.run();
    this.drawing = null;
    this.easel.hidden = true;
    this.update();
    if (drawing.error) this.tell(drawing.error);
    for (const image of images ?? []) await this.keep(image);
    if (images?.length) this.app.announce(`Drawn: ${body.prompt}`);
    this.app.imageMade();
  }

  // Stops the running image; returns false if there is none.
  stop() {
    this.drawing?.stop();
    return Boolean(this.drawing);
  }

  showDrawing(drawing) {
    const { step, numSteps, preview, state } = drawing;
    this.easel.hidden = false;
    this.easel.setAttribute("aria-busy", "true");
    const progress = element("progress", { "aria-label": "Steps", max: numSteps ?? 1 });
    if (numSteps !== null) progress.value = step;
    this.easel.replaceChildren(
      preview ? element("img", { src: preview, alt: "" }) : element("div", { class: "canvas" }, icon("image")),
      element("div", {}, element("p", {}, drawing.body.prompt), progress, element("p", { class: "state" }, state)),
    );
    this.update();
  }

  // Stores an image and shows it first.
  async keep({ blob, settings, timings }) {
    const { store } = this.app;
    const image = { id: randomId(), createdAt: Date.now(), settings, seconds: timings?.total_s ?? null };
    try {
      await store.keepImage(image, blob);
    } catch (error) {
      this.tell(storageProblem(error));
    }
    this.gallery.prepend(this.view(image));
  }

  // Shows the stored images; also called when another tab has changed them.
  async load() {
    let images = [];
    try {
      images = await this.app.store.images();
    } catch (error) {
      this.tell(storageProblem(error));
    }
    this.gallery.replaceChildren(...images.map((image) => this.view(image)));
  }

  view(image) {
    const { settings } = image;
    const about = [`${settings.width} × ${settings.height}`, `${settings.num_steps} steps`, `seed ${settings.seed}`];
    if (image.seconds) about.push(`${image.seconds.toFixed(1)} s`);
    const shown = element("img", { alt: settings.prompt.slice(0, MAX_ALT), loading: "lazy" });
    const name = `image-${settings.seed}.png`;
    const download = element("a", { class: "quiet", download: name }, "Download");
    const ask = button("Ask about this image", () => this.askAbout(image, name), "quiet ask");
    const again = iconButton("retry", "Draw again", () => this.reuse(settings));
    const remove = iconButton("trash", "Delete image", () => this.remove(image, node));
    const node = element(
      "li",
      { class: "drawn-image" },
      shown,
      element("p", { class: "caption" }, settings.prompt),
      element("p", { class: "figures" }, ...about.map((text) => element("span", {}, text))),
      element("div", { class: "message-tools" }, ask, download, again, remove),
    );
    this.allowAsking(ask);
    this.app.store.url(image.id).then((url) => {
      if (!url) return;
      shown.src = url;
      download.href = url;
    });
    return node;
  }

  allowAsking(ask) {
    ask.disabled = !this.app.canAskAbout();
    ask.title = ask.disabled ? "No model here looks at images" : "";
  }

  async askAbout(image, name) {
    const blob = await this.app.store.file(image.id);
    if (blob) this.app.askAbout(blob, name);
    else this.tell("This image is no longer kept by the browser.");
  }

  // Puts the settings of an image into the form.
  reuse({ prompt, width, height, num_steps: numSteps, seed }) {
    this.prompt.value = prompt;
    this.size.input.value = `${width}x${height}`;
    this.steps.input.value = numSteps;
    this.seed.input.value = seed;
    this.update();
    this.prompt.focus();
    this.node.scrollTo({ top: 0 });
  }

  async remove(image, node) {
    node.remove();
    this.prompt.focus();
    await this.app.store.forgetImage(image.id).catch((error) => this.tell(storageProblem(error)));
  }
}

function field(name, label, properties) {
  const input = element("input", { id: `image-${name}`, name, autocomplete: "off", ...properties });
  const node = element("label", { class: "small-field", for: `image-${name}` }, label, input);
  return { name, label, input, node };
}
