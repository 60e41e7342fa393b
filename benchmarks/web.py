"""A published model in a browser, compared with transformers.js on the same weights.

    python benchmarks/web.py MODEL [--node-modules DIR] [--rounds 3] [--new 32]

MODEL is a decoder that is exported and verified, also with ``--runtime web-wasm``. DIR holds the npm packages
onnxruntime-web, @huggingface/tokenizers and @huggingface/transformers. Chromium runs both on WebAssembly in one thread.

Each system has a page that loads its library and the model, and generates greedily. A visit without a cache downloads
everything from a server on this machine; the bytes are those that the server has sent. The next visit is made in the
same browser profile. Seconds count from the start of the visit.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from zoo_export.web.browser import FLAGS
from zoo_export.web.install import find_browser

ZOO = str(Path(sys.executable).with_name("zoo"))
OURS = """
<!doctype html><script type="module">
import { loadSession } from "./zoo.js";
const result = {};
try {
  const session = await loadSession();
  const stream = session.stream("TEXT", { max_new_tokens: 1, min_new_tokens: 1 });
  for await (const piece of stream) result.piece = piece;
  result.first = performance.now();
  await session.run("TEXT", { max_new_tokens: NEW, min_new_tokens: NEW });
  result.end = performance.now();
  session.close();
} catch (error) { result.error = String(error); }
window.result = result;
</script>
"""
THEIRS = """
<!doctype html>
<script type="importmap">{"imports": {
  "onnxruntime-web/webgpu": "/modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs",
  "onnxruntime-common": "/modules/onnxruntime-common/dist/esm/index.js"}}</script>
<script type="module">
const result = {};
try {
  const { env, pipeline } = await import("/modules/@huggingface/transformers/dist/transformers.web.min.js");
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/" });
  Object.assign(env.backends.onnx.wasm, { wasmPaths: "/modules/onnxruntime-web/dist/", numThreads: 1 });
  const generate = await pipeline("text-generation", "theirs", { dtype: "fp32", device: "wasm" });
  const options = (count) => ({ max_new_tokens: count, min_new_tokens: count, do_sample: false });
  result.piece = (await generate("TEXT", options(1)))[0].generated_text;
  result.first = performance.now();
  await generate("TEXT", options(NEW));
  result.end = performance.now();
} catch (error) { result.error = String(error); }
window.result = result;
</script>
"""


class Handler(SimpleHTTPRequestHandler):
    """Serves files, and counts the bytes of their contents."""

    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }
    sent = 0

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send a file."""
        size = Path(source.name).stat().st_size if hasattr(source, "name") else 0
        super().copyfile(source, outputfile)
        type(self).sent += size

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


def visit(context: Any, address: str) -> tuple[float, float, int]:
    """Return seconds until the first token and between it and the end, and the bytes that were sent."""
    before = Handler.sent
    page = context.new_page()
    page.goto(address)
    page.wait_for_function("window.result", timeout=300_000)
    result = page.evaluate("window.result")
    page.close()
    if "error" in result:
        raise SystemExit(f"{address}: {result['error']}")
    return result["first"] / 1000, (result["end"] - result["first"]) / 1000, Handler.sent - before


def main() -> None:
    """Publish the model twice, and visit both pages in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--node-modules", type=Path, default=Path("node_modules"))
    parser.add_argument("--text", default="hello")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        root = Path(name)
        (root / "modules").symlink_to(options.node_modules.absolute())
        for target, layout in (("ours", "web"), ("theirs", "transformers-js")):
            subprocess.run([ZOO, "publish", options.model, root / target, "--layout", layout, "--quiet"], check=True)
        for target, text in (("ours/bench.html", OURS), ("theirs.html", THEIRS)):
            (root / target).write_text(text.replace("TEXT", options.text).replace("NEW", str(options.new)))
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"http://127.0.0.1:{server.server_port}"
        pages = {"zoo": f"{host}/ours/bench.html", "transformers.js": f"{host}/theirs.html"}
        found: dict[str, list[Any]] = {label: [] for label in pages}
        for number in range(options.rounds):
            for label, address in pages.items():
                profile = root / f"profile-{label}-{number}"
                context = playwright.chromium.launch_persistent_context(
                    profile, executable_path=find_browser("web-wasm"), headless=True, args=[*FLAGS, "--disable-gpu"]
                )
                found[label].append((*visit(context, address), *visit(context, address)))
                context.close()
        server.shutdown()
    print(f"| {options.model.name} | MB | first token, s | second visit, MB | first token, s | tokens/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for label, rounds in found.items():
        first, _, sent, again, rest, more = (statistics.median(column) for column in zip(*rounds, strict=True))
        rate = (options.new - 1) / rest
        print(f"| {label} | {sent / 1e6:.1f} | {first:.2f} | {more / 1e6:.1f} | {again:.2f} | {rate:.1f} |")


if __name__ == "__main__":
    main()
