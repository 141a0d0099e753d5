const tip = document.getElementById("tip");
const show = (event) => {
  const mark = event.target.closest("[data-tip]");
  if (!mark) { tip.style.opacity = 0; return; }
  tip.textContent = mark.dataset.tip;
  tip.style.opacity = 1;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const y = event.clientY - tip.offsetHeight - 12;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${y < 4 ? event.clientY + 18 : y}px`;
};
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
