// Dialogs: their content is made when they open, and they resolve when they close.

import { element, iconButton } from "./dom.js";

// Shows a dialog, filled by `fill(body, close)`. Resolves to the argument of `close`, or null.
export function openDialog(title, fill, properties = {}) {
  return new Promise((resolve) => {
    let result = null;
    const close = (value = null) => {
      result = value;
      dialog.close();
    };
    const heading = element("h2", { id: "dialog-title" }, title);
    const body = element("div", { class: "dialog-body" });
    const head = element(
      "header",
      {},
      heading,
      iconButton("close", "Close", () => close()),
    );
    const dialog = element("dialog", { "aria-labelledby": "dialog-title", ...properties }, head, body);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    // A press and release on the backdrop closes the dialog, except while the user has written something: a selection
    // that ends outside, or a slip, does not.
    let isWritten = false;
    let isPressedOutside = false;
    dialog.addEventListener("input", () => (isWritten = true));
    dialog.addEventListener("pointerdown", (event) => (isPressedOutside = event.target === dialog));
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog && isPressedOutside && !isWritten) close();
    });
    fill(body, close);
    document.body.append(dialog);
    dialog.showModal();
    (body.querySelector("[autofocus]") ?? body.querySelector("input, textarea, button"))?.focus();
  });
}

export function actions(...buttons) {
  return element("div", { class: "actions" }, ...buttons);
}

export function button(text, onclick, kind = "quiet", properties = {}) {
  return element("button", { type: "button", class: kind, onclick, ...properties }, text);
}

// Resolves to whether the user agreed.
export async function confirmDialog(title, text, yes) {
  const answer = await openDialog(title, (body, close) => {
    body.append(
      element("p", {}, text),
      actions(
        button("Cancel", () => close(false)),
        button(yes, () => close(true), "danger", { autofocus: true }),
      ),
    );
  });
  return answer === true;
}

// Resolves to the user's text, or null. `check` returns the problem of a text, or null.
export function askDialog({ title, label, text = "", value = "", yes, type = "text", check = () => null }) {
  return openDialog(title, (body, close) => {
    const input = element("input", {
      id: "asked",
      type,
      autocomplete: "off",
      autofocus: true,
      "aria-describedby": "asked-wrong",
    });
    const wrong = element("span", { class: "wrong", id: "asked-wrong", role: "alert" });
    input.value = value;
    const done = () => {
      const written = input.value.trim();
      wrong.textContent = (written && check(written)) ?? "";
      if (written && !wrong.textContent) close(written);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault(); // or the button that the focus goes back to would be pressed by it
      done();
    });
    if (text) body.append(element("p", {}, text));
    body.append(
      element("label", { for: "asked" }, label),
      input,
      wrong,
      actions(
        button("Cancel", () => close()),
        button(yes, done, "primary"),
      ),
    );
    queueMicrotask(() => input.select());
  });
}
