// Follows a run that is being written: asks every two seconds for this page, and puts what is new
// in place of what is shown. What is open stays open. When nobody answers, it says so.

const wait = 2000;
let tag = null;
let waiting = null;

function said(text) {
  const line = document.getElementById("live");
  if (line.textContent !== text) line.textContent = text;
}

function opened() {
  return new Set([...document.querySelectorAll("details[open]")].map((one) => one.id));
}

function show(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const open = opened();
  for (const name of ["header", "main"]) {
    document.querySelector(name).replaceWith(fresh.querySelector(name));
  }
  document.querySelectorAll("details").forEach((one) => (one.open ||= open.has(one.id)));
  document.querySelectorAll("[data-tools]").forEach(equip);
}

async function ask() {
  try {
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch(location.pathname, { headers, cache: "no-store" });
    if (answer.status === 200) {
      const first = tag === null;
      tag = answer.headers.get("ETag");
      const text = await answer.text();
      if (!first || document.documentElement.dataset.tag !== tag) show(text);
    }
    if (answer.ok || answer.status === 304) said("Live: asked every two seconds.");
    else said(`The server answers ${answer.status}: what is shown may be old.`);
  } catch {
    said("Nobody answers: halfulp serve has ended, and what is shown may be old.");
  }
  waiting = setTimeout(ask, wait);
}

addEventListener("pagehide", () => clearTimeout(waiting));
waiting = setTimeout(ask, wait);
