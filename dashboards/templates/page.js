"use strict";
// Draws the figures in #figures as they come near the screen, in the ink of the page: light, dark, or
// paper.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = Object.keys(figures).map((id) => document.getElementById(id));
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };

  // The page's colours for a layout, by path, as Plotly.relayout takes them.
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
  const inked = (layout) => {
    for (const [path, value] of Object.entries(ink())) {
      const names = path.split(".");
      const last = names.pop();
      names.reduce((part, name) => (part[name] ??= {}), layout)[last] = value;
    }
    return layout;
  };

  const isDrawn = (plot) => plot.classList.contains("js-plotly-plot");
  // Reading Plotly takes longer than all the rest of the page: it is text until a picture needs it.
  const readPlotly = () => {
    const text = document.getElementById("plotly").textContent;
    document.head.append(Object.assign(document.createElement("script"), { textContent: text }));
  };
  const draw = (plot) => {
    if (!("Plotly" in window)) readPlotly();
    const { data, layout } = figures[plot.id];
    layout.height = Math.min(layout.height, plot.clientHeight || layout.height); // lower on a phone
    return Plotly.newPlot(plot, data, inked(layout), config);
  };
  const relayout = (size) =>
    plots.filter(isDrawn).forEach((plot) => Plotly.relayout(plot, { ...size, ...ink() }));
  const repaint = () => relayout({});
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

  // Only pictures that come within a screen of being seen, one after the other, so that the page
  // stays responsive meanwhile.
  const breath = () => new Promise((resolve) => setTimeout(resolve));
  let before = Promise.resolve();
  const near = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        near.unobserve(target);
        before = before.then(() => isDrawn(target) || draw(target)).then(breath);
      }
    },
    { rootMargin: "100% 0px" },
  );
  plots.forEach((plot) => near.observe(plot));

  // Paper: the page is laid out anew without a resize event, so the plots get a width that fits.
  // The first picture leaves room for its cards below it.
  const PAPER_WIDTH_PX = 640;
  const PAPER_FIRST_PX = 300;
  const firsts = plots.filter((plot) => plot.closest(".first"));
  const resizeFirsts = (height) =>
    firsts.filter(isDrawn).forEach((plot) => Plotly.relayout(plot, { height: height(plot) }));
  addEventListener("beforeprint", () => {
    plots.filter((plot) => !isDrawn(plot)).forEach(draw);
    relayout({ autosize: false, width: PAPER_WIDTH_PX });
    resizeFirsts(() => PAPER_FIRST_PX);
  });
  addEventListener("afterprint", () => {
    relayout({ autosize: true, width: null });
    resizeFirsts((plot) => figures[plot.id].layout.height);
  });
  matchMedia("print").addEventListener("change", repaint);
})();
