"use strict";
// A link to a closed case opens it; paper shows every case.
(() => {
  const open = () => {
    const one = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!(one instanceof HTMLDetailsElement)) return;
    one.open = true;
    one.scrollIntoView();
  };
  addEventListener("hashchange", open);
  addEventListener("beforeprint", () =>
    document.querySelectorAll("details").forEach((one) => (one.open = true)),
  );
  open();
})();
