// Decodes server-sent events: chunks may end within a character, a line or a pair of CR and LF.

export class EventParser {
  constructor() {
    this.decoder = new TextDecoder();
    this.rest = ""; // of an incomplete line
    this.data = []; // lines of the current event
    this.endsInReturn = false; // a line feed that follows belongs to the return
  }

  // Returns the data of the events that these bytes complete.
  push(bytes) {
    return this.read(this.decoder.decode(bytes, { stream: true }));
  }

  read(text) {
    const isPaired = this.endsInReturn && text.startsWith("\n");
    if (text) this.endsInReturn = text.endsWith("\r");
    if (isPaired) text = text.slice(1);
    const lines = text.split(/\r\n|\r|\n/);
    lines[0] = this.rest + lines[0];
    this.rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.data.length) events.push(this.data.join("\n"));
        this.data = [];
      } else if (line.startsWith("data:")) {
        this.data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

// Yields the data of each event of a response as it arrives.
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
