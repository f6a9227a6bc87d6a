// Before anything is drawn, so that the page does not flash in the other theme.
document.documentElement.dataset.theme = "system";
try {
  document.documentElement.dataset.theme = localStorage.getItem("tilewright-theme") ?? "system";
} catch {
  // The browser keeps nothing for this page, and says so by an exception; app.js tells the user.
}
