// Records a sound with the microphone.

import { closeDevice, deviceProblem, openDevice } from "./devices.js";
import { actions, button, openDialog } from "./dialogs.js";
import { element } from "./dom.js";
import { toInt16, wavBlob } from "./wav.js";

const RATE = 16_000; // the models' sample rate

// Resolves to a File, or null if nothing was recorded.
export async function recordSound() {
  let recording = null;
  let isClosed = false;
  const file = await openDialog("Microphone", (body, close) => {
    const message = element("p", { role: "status" }, "Waiting for the microphone…");
    const done = button(
      "Add recording",
      async () => {
        done.disabled = true;
        try {
          close(new File([await recording.finish()], "recording.wav", { type: "audio/wav" }));
        } catch (error) {
          message.textContent = `The recording cannot be used: ${error.message}`;
        }
      },
      "primary",
      { disabled: true },
    );
    body.append(
      message,
      actions(
        button("Cancel", () => close()),
        done,
      ),
    );
    openDevice({ audio: true })
      .then((stream) => {
        recording = new Recording(stream, (seconds) => (message.textContent = `Recording, ${seconds} s`));
        if (isClosed) {
          recording.end();
          return;
        }
        done.disabled = false;
        done.focus();
      })
      .catch((error) => {
        message.textContent = deviceProblem("microphone", error);
      });
  });
  isClosed = true;
  recording?.end();
  return file;
}

class Recording {
  constructor(stream, onSecond) {
    this.stream = stream;
    this.pieces = [];
    this.recorder = new MediaRecorder(stream);
    this.recorder.addEventListener("dataavailable", ({ data }) => this.pieces.push(data));
    this.recorder.start(1000);
    let seconds = 0;
    onSecond(seconds);
    this.timer = setInterval(() => onSecond((seconds += 1)), 1000);
  }

  // Returns the recording so far as a WAV file: browsers' own formats have no length, which the server needs.
  async finish() {
    const stopped = new Promise((resolve) => this.recorder.addEventListener("stop", resolve, { once: true }));
    this.recorder.stop();
    await stopped;
    const recorded = await new Blob(this.pieces, { type: this.recorder.mimeType }).arrayBuffer();
    const context = new OfflineAudioContext(1, 1, RATE);
    const sound = await context.decodeAudioData(recorded);
    return wavBlob(toInt16(mixed(sound)), RATE);
  }

  end() {
    clearInterval(this.timer);
    closeDevice(this.stream);
  }
}

// Returns one channel, the mean of all.
function mixed(sound) {
  const samples = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    sound.getChannelData(channel).forEach((one, i) => (samples[i] += one / sound.numberOfChannels));
  }
  return samples;
}
