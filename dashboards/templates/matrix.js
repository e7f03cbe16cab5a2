"use strict";
// What a cell says stands in the half of the window that the cell is not in; Escape closes it.
(() => {
  const show = ({ target }) => {
    const cell = target.closest?.(".cell");
    if (!cell) return;
    const { top } = cell.getBoundingClientRect();
    document.body.dataset.tips = top > innerHeight / 2 ? "above" : "below";
  };
  addEventListener("focusin", show);
  addEventListener("mouseover", show);
  addEventListener("keydown", ({ key }) => {
    if (key === "Escape") document.body.dataset.tips = "closed";
  });
})();
