// Takes an image with the camera.

import { drawn } from "./attachments.js";
import { closeDevice, deviceProblem, openDevice } from "./devices.js";
import { actions, button, openDialog } from "./dialogs.js";
import { element } from "./dom.js";

// Resolves to a File, or null if no image was taken.
export async function takePhoto() {
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
      "Take photo",
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
    openDevice({ video: { facingMode: { ideal: "environment" }, width: { ideal: 1280 } } })
      .then((opened) => {
        stream = opened;
        if (isClosed) {
          closeDevice(stream);
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
        message.textContent = deviceProblem("camera", error);
      });
  });
  isClosed = true;
  closeDevice(stream);
  return file;
}
