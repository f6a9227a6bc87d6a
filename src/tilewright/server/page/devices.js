// Opens the camera and the microphone, and explains why one cannot be used.

const PROBLEMS = {
  NotAllowedError: (name) => `The ${name} was refused. The browser's settings for this page can allow it.`,
  NotFoundError: (name) => `This machine has no ${name} that the browser can see.`,
  NotReadableError: (name) => `The ${name} cannot be used; another program may hold it.`,
};

// Resolves to a stream.
export async function openDevice(constraints) {
  if (!navigator.mediaDevices?.getUserMedia) {
    throw new Error("browsers allow it only over https, or on this machine itself.");
  }
  return navigator.mediaDevices.getUserMedia(constraints);
}

// Returns an error with a device in plain words.
export function deviceProblem(name, error) {
  return PROBLEMS[error.name]?.(name) ?? `The ${name} cannot be used: ${error.message}`;
}

export function closeDevice(stream) {
  stream?.getTracks().forEach((track) => track.stop());
}
