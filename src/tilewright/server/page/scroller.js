// Follows a growing text until the reader scrolls up.

const NEAR = 48; // pixels from the end that count as at the end

export class Scroller {
  constructor(node, jumpButton) {
    this.node = node;
    this.jumpButton = jumpButton;
    this.isPinned = true;
    this.lastTop = 0;
    node.addEventListener("scroll", () => this.scrolled(), { passive: true });
    jumpButton.addEventListener("click", () => this.toEnd());
    const observer = new ResizeObserver(() => this.follow());
    observer.observe(node);
    observer.observe(node.firstElementChild); // images have their size only when they are read
  }

  get distance() {
    return this.node.scrollHeight - this.node.clientHeight - this.node.scrollTop;
  }

  // Only moving up stops following: the text may grow between automatic scrolling and its event.
  scrolled() {
    if (this.distance < NEAR) this.isPinned = true;
    else if (this.node.scrollTop < this.lastTop - 1) this.isPinned = false;
    this.lastTop = this.node.scrollTop;
    this.jumpButton.hidden = this.isPinned || this.distance < NEAR;
  }

  follow() {
    if (this.isPinned) this.node.scrollTop = this.node.scrollHeight;
  }

  toTop() {
    this.isPinned = false;
    this.node.scrollTop = this.lastTop = 0;
    this.jumpButton.hidden = true;
  }

  toEnd() {
    this.isPinned = true;
    this.jumpButton.hidden = true;
    this.follow();
  }
}
