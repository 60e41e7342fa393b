// Starts the page. It is no module, so that it can say why modules are not loaded.
// @ts-check

/** The modules that the page imports. */
const MODULES = ["page.js", "zoo.js", "errors.js", "options.js"];

/** Say why they cannot be loaded. */
async function explain() {
  for (const name of MODULES) {
    const response = await fetch(name).catch(() => null), type = response?.headers.get("Content-Type") ?? "";
    if (!response?.ok) return `${name} cannot be loaded (${response ? `${response.status} ${response.statusText}` : "network error"}).`;
    if (type.includes("html")) return `${name} cannot be loaded (the server sent a web page instead).`;
    if (!type.includes("javascript")) return `${name} is sent as ${type || "no type"}: the server must send it as text/javascript.`;
    if (!(await response.text()).trim()) return `${name} is empty: publish the model again.`;
  }
  return `One of ${MODULES.join(", ")} is damaged: publish the model again.`;
}

/** @param {string} text */
function announce(text) {
  const place = /** @type {HTMLElement} */ (document.getElementById("problem"));
  place.textContent = text;
}

if (location.protocol === "file:") announce("This page needs a web server: opened as a file, it cannot load the model.");
else import("./page.js").then(({ start }) => start()).catch(async () => announce(await explain()));
