"use strict";
(() => {
  const gallery = document.getElementById("cards");
  if (!gallery) return;
  const control = Object.fromEntries(["search", "show", "group", "order"].map((id) => [id, document.getElementById(id)]));
  const count = document.getElementById("count");
  const cards = [...gallery.querySelectorAll(".card")];
  const plain = (text) => text.normalize("NFKC").toLowerCase();
  const textOf = (card, what) => [...card.querySelectorAll(what)].map((one) => one.textContent).join("\n");
  const haystack = new Map(cards.map((card) => [card, plain(textOf(card, ".prompt, .reason, .summary, dd"))]));
  const failedFirst = new Map(cards.map((card, place) => [card, place]));

  const timesOfSeed = new Map();
  for (const card of cards) timesOfSeed.set(card.dataset.seed, (timesOfSeed.get(card.dataset.seed) ?? 0) + 1);
  const isShared = (card) => timesOfSeed.get(card.dataset.seed) > 1;
  const ofSeed = (card) => BigInt(card.dataset.seed || 0);
  const compared = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const orders = {
    "": { by: () => 0, heading: () => "" },
    group: { by: (a, b) => a.dataset.group - b.dataset.group, heading: (card) => card.dataset.label },
    seed: {
      by: (a, b) => isShared(b) - isShared(a) || compared(ofSeed(a), ofSeed(b)),
      heading: (card) => (isShared(card) ? `seed ${card.dataset.seed}` : "seeds of one image"),
    },
    prompt: { by: (a, b) => compared(textOf(a, ".prompt"), textOf(b, ".prompt")), heading: () => "" },
  };

  function arrange() {
    const order = orders[control.order.value];
    cards.sort((a, b) => order.by(a, b) || failedFirst.get(a) - failedFirst.get(b));
    gallery.replaceChildren(...cards);
    filter();
  }

  function filter() {
    const words = plain(control.search.value).split(/\s+/).filter(Boolean);
    const { show, group, order } = control;
    for (const one of gallery.querySelectorAll(".heading")) one.remove();
    let shown = 0;
    let last = "";
    for (const card of cards) {
      const passes =
        (!show.value || card.dataset.status === show.value) &&
        (!group.value || card.dataset.group === group.value) &&
        words.every((word) => haystack.get(card).includes(word));
      card.hidden = !passes;
      if (!passes) continue;
      shown += 1;
      const heading = orders[order.value].heading(card);
      if (heading && heading !== last) {
        const element = document.createElement("h3");
        element.className = "heading";
        element.textContent = last = heading;
        card.before(element);
      }
    }
    const all = cards.length.toLocaleString("en");
    count.textContent = shown === cards.length ? `${all} images` : `${shown.toLocaleString("en")} of ${all} images`;
  }

  control.search.addEventListener("input", filter);
  control.show.addEventListener("change", filter);
  control.group.addEventListener("change", filter);
  control.order.addEventListener("change", arrange);
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());

  const viewer = document.getElementById("viewer");
  const shown = document.getElementById("shown");
  let current = null;

  function view(card) {
    current = card;
    const picture = document.createElement("div");
    picture.className = "picture";
    picture.append(...[...card.querySelector(".picture").childNodes].map((node) => node.cloneNode(true)));
    const words = document.createElement("div");
    words.append(...[".prompt", ".whole", "dl"].map((one) => card.querySelector(one)?.cloneNode(true)).filter(Boolean));
    shown.className = card.dataset.status;
    shown.replaceChildren(picture, words);
    if (!viewer.open) viewer.showModal();
    viewer.scrollTop = 0;
  }

  function step(by) {
    const there = cards.filter((card) => !card.hidden);
    const next = there[there.indexOf(current) + by];
    if (next) view(next);
  }

  gallery.addEventListener("click", (event) => {
    const button = event.target.closest("button.picture");
    if (button) view(button.closest(".card"));
  });
  document.getElementById("before").addEventListener("click", () => step(-1));
  document.getElementById("after").addEventListener("click", () => step(1));
  viewer.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  viewer.addEventListener("click", (event) => {
    if (event.target === viewer) viewer.close();
  });
})();
