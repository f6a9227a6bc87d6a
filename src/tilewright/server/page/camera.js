// A picture taken with the camera.

import { drawn } from "./attachments.js";
import { actions, button, openDialog } from "./dialogs.js";
import { element } from "./dom.js";

const PROBLEMS = {
  NotAllowedError: "The camera was refused. The browser's settings for this page can allow it.",
  NotFoundError: "This machine has no camera that the browser can see.",
  NotReadableError: "The camera cannot be used; another program may hold it.",
};

// Resolves to a File, or null if none was taken.
export async function takePicture() {
  let stream = null;
  let isClosed = false;
  const file = await openDialog("Camera", (body, close) => {
    const video = element("video", {
      class: "camera",
      autoplay: true,
      playsinline: true,
      muted: true,
      "aria-label": "What the camera sees",
    });
    video.muted = true;
    const message = element("p", { role: "status" }, "Waiting for the camera…");
    const take = button(
      "Take picture",
      async () => {
        const blob = await drawn(video, video.videoWidth, video.videoHeight, "image/jpeg");
        close(new File([blob], "camera.jpg", { type: "image/jpeg" }));
      },
      "primary",
      { disabled: true },
    );
    body.append(
      video,
      message,
      actions(
        button("Cancel", () => close()),
        take,
      ),
    );
    openCamera()
      .then((opened) => {
        stream = opened;
        if (isClosed) {
          end(stream);
          return;
        }
        video.srcObject = stream;
        video.onloadeddata = () => {
          message.hidden = true;
          take.disabled = false;
          take.focus();
        };
      })
      .catch((error) => {
        video.hidden = true;
        message.textContent = PROBLEMS[error.name] ?? `The camera cannot be used: ${error.message}`;
      });
  });
  isClosed = true;
  end(stream);
  return file;
}

function openCamera() {
  if (!navigator.mediaDevices?.getUserMedia) {
    return Promise.reject(new Error("browsers allow it only over https, or on this machine itself."));
  }
  return navigator.mediaDevices.getUserMedia({
    video: { facingMode: { ideal: "environment" }, width: { ideal: 1280 } },
  });
}

function end(stream) {
  stream?.getTracks().forEach((track) => track.stop());
}
