// Makes unique ids. crypto.randomUUID exists only in secure contexts; this page may be served over plain http.

export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
