// Starts the page. It is no module, so that it can say why modules are not loaded.
// @ts-check

/** Say why the page's modules cannot be loaded. @param {Error} error */
async function explain({ message }) {
  for (const name of ["page.js", "zoo.js", "errors.js", "options.js"]) {
    const response = await fetch(name).catch(() => null), type = response?.headers.get("Content-Type");
    if (!response?.ok) return `${name} cannot be loaded (${response ? `${response.status} ${response.statusText}` : "network error"}).`;
    if (!type?.includes("javascript")) return `${name} is sent as ${type}: the server must send it as text/javascript.`;
  }
  return `The page cannot start (${message}): publish the model again.`;
}

/** @param {string} text */
function announce(text) {
  const place = /** @type {HTMLElement} */ (document.getElementById("problem"));
  place.textContent = text;
}

if (location.protocol === "file:") announce("This page needs a web server: opened as a file, it cannot load the model.");
else import("./page.js").catch(async (error) => announce(await explain(error)));
