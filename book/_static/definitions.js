/* Shows a term's definition beside its link: on hover, on focus, at the first tap. Escape hides it. */
addEventListener("DOMContentLoaded", () => {
  "use strict";
  const DELAY = 200; // time to move the pointer from the link into the box
  let box = null;
  let leaving = 0;

  const hide = () => {
    clearTimeout(leaving);
    if (box) box.hidden = true;
    box = null;
  };
  const hideSoon = () => {
    clearTimeout(leaving);
    leaving = setTimeout(hide, DELAY);
  };
  const stay = () => clearTimeout(leaving);

  /** Below the link, or above it where there is no room below, and never beyond the column. */
  const show = (link, wanted) => {
    stay();
    if (box === wanted) return;
    hide();
    box = wanted;
    box.hidden = false;
    const line = link.getClientRects()[0];
    const page = box.offsetParent.getBoundingClientRect();
    const right = Math.min(page.right, document.documentElement.clientWidth) - box.offsetWidth - 8;
    const above = line.bottom + box.offsetHeight + 8 > innerHeight && line.top > box.offsetHeight + 8;
    box.style.left = `${Math.max(Math.min(line.left, right), 8) - page.left}px`;
    box.style.top = `${(above ? line.top - box.offsetHeight - 4 : line.bottom + 4) - page.top}px`;
  };

  for (const link of document.querySelectorAll('article a[href*="#term-"]')) {
    const wanted = document.getElementById(link.hash.slice(1).replace("term-", "definition-"));
    if (!wanted) continue;
    let tapped = false;
    link.setAttribute("aria-describedby", wanted.id);
    link.addEventListener("pointerdown", (event) => { tapped = event.pointerType !== "mouse" && box !== wanted; });
    link.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") show(link, wanted); });
    link.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hideSoon(); });
    link.addEventListener("focus", () => show(link, wanted));
    link.addEventListener("blur", hideSoon);
    link.addEventListener("click", (event) => {
      if (!tapped) return; // a second tap, a mouse or a key follows the link
      event.preventDefault();
      show(link, wanted);
    });
    wanted.addEventListener("pointerenter", stay);
    wanted.addEventListener("pointerleave", hideSoon);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("pointerdown", (event) => {
    if (box && !box.contains(event.target) && !event.target.closest('a[href*="#term-"]')) hide();
  });
});
