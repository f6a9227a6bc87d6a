// Sets the theme before anything is drawn, so that the page does not flash in the other theme.
document.documentElement.dataset.theme = "system";
try {
  document.documentElement.dataset.theme = localStorage.getItem("tilewright-theme") ?? "system";
} catch {
  // The browser stores nothing for this page and throws; app.js tells the user.
}
