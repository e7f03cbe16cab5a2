"use strict";
// What a cell says stands in the half of the window that the cell is not in; Escape closes it. The
// arrow keys move between cells, of which one is in the order of Tab.
(() => {
  const matrix = document.querySelector(".matrix");
  const lines = [...matrix.querySelectorAll("tbody tr:not(.group)")].map((line) => [
    ...line.querySelectorAll("td:not(.requirement)"),
  ]);
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const move = (cell, [down, right]) => {
    let row = lines.findIndex((line) => line.includes(cell));
    let column = lines[row].indexOf(cell);
    let next;
    do {
      row += down;
      column += right;
      next = lines[row]?.[column];
    } while (next && !next.hasAttribute("tabindex"));
    next?.focus();
  };
  const show = ({ target }) => {
    const cell = target.closest?.(".cell");
    if (!cell) return;
    const { top } = cell.getBoundingClientRect();
    document.body.dataset.tips = top > innerHeight / 2 ? "above" : "below";
  };
  matrix.querySelector("td.cell")?.setAttribute("tabindex", "0");
  addEventListener("focusin", show);
  addEventListener("mouseover", show);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.body.dataset.tips = "closed";
    const cell = event.target.closest?.(".matrix td.cell");
    if (!cell || !(event.key in steps)) return;
    event.preventDefault();
    move(cell, steps[event.key]);
  });
})();
