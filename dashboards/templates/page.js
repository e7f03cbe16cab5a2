"use strict";
// Draws the figures in #figures and gives them the ink of the page: light, dark, or paper.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = Object.keys(figures).map((id) => document.getElementById(id));
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };

  const ink = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = (name) => ({
      [`${name}.gridcolor`]: colour("--grid"),
      [`${name}.linecolor`]: colour("--rule"),
    });
    return {
      "font.color": colour("--ink"),
      "font.family": getComputedStyle(document.body).fontFamily,
      "hoverlabel.bgcolor": colour("--raised"),
      "hoverlabel.bordercolor": colour("--rule"),
      "hoverlabel.font.color": colour("--ink"),
      ...axis("xaxis"),
      ...axis("yaxis"),
    };
  };
  const repaint = () => plots.forEach((plot) => Plotly.relayout(plot, ink()));

  const drawn = plots.map((plot) => Plotly.newPlot(plot, { ...figures[plot.id], config }));
  Promise.all(drawn).then(repaint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

  // Paper: the page is laid out anew without telling the plots, so they are told a width that fits.
  const PAPER_WIDTH_PX = 640;
  const resize = (size) => plots.forEach((plot) => Plotly.relayout(plot, { ...size, ...ink() }));
  addEventListener("beforeprint", () => resize({ autosize: false, width: PAPER_WIDTH_PX }));
  addEventListener("afterprint", () => resize({ autosize: true, width: null }));
  matchMedia("print").addEventListener("change", repaint);
})();
