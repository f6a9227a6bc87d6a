// Before anything is drawn, so that the page does not flash in the other theme.
document.documentElement.dataset.theme = localStorage.getItem("tilewright-theme") ?? "system";
