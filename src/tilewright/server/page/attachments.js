// The kinds of files that can be sent, and how to show, resize and send each.

import { element } from "./dom.js";
import { randomId } from "./ids.js";

const JPEG_QUALITY = 0.9;
const NUM_SHRINKS = 6;

// One row per kind: a kind of the server's input_modalities.
export const KINDS = {
  image: {
    noun: "images",
    accept: "image/*",
    part: (url) => ({ type: "image_url", image_url: { url } }),
    preview: (url, name) => element("img", { src: url, alt: name, title: name }),
    fit: fitImage,
  },
  video: {
    noun: "video",
    accept: "video/*",
    part: (url) => ({ type: "video_url", video_url: { url } }),
    preview: (url, name) =>
      element("video", {
        src: url,
        "aria-label": name,
        title: name,
        muted: true,
        preload: "metadata",
        playsinline: true,
      }),
    fit: asItIs,
  },
  audio: {
    noun: "sound",
    accept: "audio/*",
    part: (url) => ({ type: "audio_url", audio_url: { url } }),
    preview: (url, name) => element("audio", { src: url, "aria-label": name, title: name, preload: "metadata" }),
    fit: asItIs,
  },
};

// A file cannot be sent; the message is the reason.
export class Refused extends Error {}

export function kindsOf(model) {
  return Object.keys(KINDS).filter((kind) => model?.input_modalities?.includes(kind));
}

// Returns "images, video and sound", for example, or "" for a model that accepts text only.
export function nounsOf(model) {
  const nouns = kindsOf(model).map((kind) => KINDS[kind].noun);
  return [nouns.slice(0, -1).join(", "), ...nouns.slice(-1)].filter(Boolean).join(" and ");
}

// Returns { attachment, blob, note }: the file in a form that model and server accept, and a note about changes.
export async function attach(file, model) {
  const kind = Object.keys(KINDS).find((one) => file.type.startsWith(`${one}/`));
  const name = file.name || (kind ? `${kind}.${file.type.split("/")[1]}` : "file");
  if (!kind) throw new Refused(`${name} cannot be sent: it is neither an image, a video nor a sound.`);
  if (!model) throw new Refused(`${name} cannot be added before the server has sent its model.`);
  if (!kindsOf(model).includes(kind)) {
    throw new Refused(
      `${name} cannot be sent: ${model.id} takes ${nounsOf(model) ? `text and ${nounsOf(model)}` : "text"} only.`,
    );
  }
  const limits = model.limits ?? {};
  const { blob, note } = await KINDS[kind].fit(file, name, limits);
  if (blob.size > limits.max_media_bytes) {
    throw new Refused(
      `${name} has ${sizeText(blob.size)}; this server takes at most ${sizeText(limits.max_media_bytes)} per file.`,
    );
  }
  if (!blob.size) throw new Refused(`${name} is empty.`);
  return { attachment: { id: randomId(), kind, name, type: blob.type, sizeBytes: blob.size }, blob, note };
}

async function asItIs(file) {
  return { blob: file, note: null };
}

// Sends images unchanged, unless the server would refuse their size: then reduces them.
async function fitImage(file, name, limits) {
  let image;
  try {
    image = await createImageBitmap(file);
  } catch {
    return { blob: file, note: null }; // this browser cannot read the image, but the server may
  }
  try {
    return await shrunk(image, file, name, limits);
  } finally {
    image.close(); // otherwise its pixels stay in memory until garbage collection: 100 MB for 25 million pixels
  }
}

async function shrunk(image, file, name, limits) {
  const { width, height } = image;
  const isTooLarge = file.size > limits.max_media_bytes || width * height > limits.max_pixels;
  if (!isTooLarge) return { blob: file, note: null };
  let scale = Math.min(1, Math.sqrt(limits.max_pixels / (width * height)));
  for (let attempt = 0; attempt < NUM_SHRINKS; attempt += 1, scale *= 0.7) {
    const blob = await drawn(
      image,
      Math.max(1, Math.floor(width * scale)),
      Math.max(1, Math.floor(height * scale)),
      "image/jpeg",
    );
    if (blob.size <= limits.max_media_bytes) {
      const size = `${Math.floor(width * scale)} × ${Math.floor(height * scale)}`;
      return {
        blob,
        note: `${name} was over this server's limit and is sent smaller: ${size}, ${sizeText(blob.size)}.`,
      };
    }
  }
  return { blob: file, note: null };
}

// Returns an image, or a frame of a video, at a given size as a Blob.
export function drawn(source, width, height, type) {
  const canvas = element("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency and would show black
  context.fillRect(0, 0, width, height);
  context.drawImage(source, 0, 0, width, height);
  return new Promise((resolve, reject) => {
    canvas.toBlob(
      (blob) => (blob ? resolve(blob) : reject(new Refused("The image is too large for this browser."))),
      type,
      JPEG_QUALITY,
    );
  });
}

export function sizeText(sizeBytes) {
  if (sizeBytes < 1024) return `${sizeBytes} bytes`;
  if (sizeBytes < 1024 * 1024) return `${(sizeBytes / 1024).toFixed(0)} KiB`;
  return `${(sizeBytes / 1024 / 1024).toFixed(1)} MiB`;
}
