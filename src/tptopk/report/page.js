"use strict";
(() => {
  const root = document.documentElement;
  const all = () => [...document.querySelectorAll("main details")];
  document.querySelector(".buttons").hidden = false;

  const theme = document.getElementById("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-pressed", String(dark())); };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();

  const toggle = document.getElementById("details");
  toggle.addEventListener("click", () => {
    const open = toggle.getAttribute("aria-pressed") !== "true";
    for (const item of all()) item.open = open;
    toggle.setAttribute("aria-pressed", String(open));
    toggle.textContent = open ? "Hide details" : "Show all details";
  });

  let closed = [];  // on paper everything is open but the tables of numbers
  addEventListener("beforeprint", () => { closed = all().filter((item) => !item.open); for (const item of closed) item.open = true; });
  addEventListener("afterprint", () => { for (const item of closed) item.open = false; });

  for (const chart of document.querySelectorAll(".chart")) {
    const points = JSON.parse(chart.dataset.points), width = Number(chart.dataset.width);
    const readout = chart.querySelector(".readout"), cursor = chart.querySelector(".cursor");
    let place = -1;
    const show = (index) => {
      place = Math.max(0, Math.min(points.length - 1, index));
      const [x, label, lines] = points[place];
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("visibility", "visible");
      readout.textContent = [chart.dataset.x + ": " + label, ...lines].join("\n");
      const left = x / width * chart.clientWidth;
      readout.style.left = Math.max(0, Math.min(chart.clientWidth - readout.offsetWidth, left + (left > chart.clientWidth / 2 ? -readout.offsetWidth - 10 : 10))) + "px";
    };
    const hide = () => { place = -1; readout.textContent = ""; cursor.setAttribute("visibility", "hidden"); };
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
      let best = 0;
      points.forEach((point, index) => { if (Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = index; });
      show(best);
    });
    chart.addEventListener("pointerleave", () => { if (document.activeElement !== chart) hide(); });
    chart.addEventListener("focus", () => { if (place < 0) show(points.length - 1); });
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const stride = Math.max(1, Math.round(points.length / 40));
      const moved = { ArrowLeft: place - stride, ArrowRight: place + stride, Home: 0, End: points.length - 1 }[event.key];
      if (event.key === "Escape") hide();
      if (moved === undefined) return;
      event.preventDefault();
      show(moved);
    });
  }
})();
