"""Take the screenshots of the documentation again: a published page and an attention page, in four windows each.

    zoo import MINILM -o minilm && zoo export minilm --onnx --attentions && zoo export minilm --onnx
    zoo verify minilm --runtime web-wasm
    python benchmarks/screenshots.py minilm

MINILM is the directory of a checkpoint of all-MiniLM-L6-v2. The windows are 1280 and 390 pixels wide, light and dark.
The front page shows the light ones alone.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import zoo
from zoo_export.publish.web import write_web
from zoo_export.web.browser import FLAGS
from zoo_export.web.install import find_browser

TARGET = Path(__file__).parents[1] / "docs" / "_static"
WINDOWS = {1280: 800, 390: 800}
TEXTS = ("time flies like an arrow", "the clock is ticking")
GAP = 16


class Handler(SimpleHTTPRequestHandler):
    """Serves files."""

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


def use_page(tab: Any, address: str) -> None:
    """Load the model of a published page, and run it."""
    tab.goto(address)
    tab.click("#load")
    tab.wait_for_selector("#form", timeout=300_000)
    tab.click("#run")
    tab.wait_for_function("() => /^Done/.test(document.getElementById('status').textContent)")


def use_attention(tab: Any, address: str) -> None:
    """Show all heads in a wide window, and the lines of one in a narrow window."""
    tab.goto(f"{address}#view={'overview' if tab.viewport_size['width'] > 1000 else 'lines&layer=3&head=11'}")
    tab.wait_for_selector("#stage[data-ready=all]")


def screenshots(browser: Any, use: Callable[[Any, str], None], address: str) -> Image.Image:
    """Return the pictures of all windows: light ones above dark ones."""
    rows = []
    for theme in ("light", "dark"):
        row = []
        for width, height in WINDOWS.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
            tab = context.new_page()
            use(tab, address)
            row.append(Image.open(io.BytesIO(tab.screenshot())).convert("RGB"))
            context.close()
        rows.append(row)
    wide = sum(WINDOWS) + GAP * (len(WINDOWS) - 1)
    whole = Image.new("RGB", (wide, 2 * max(WINDOWS.values()) + GAP), (136, 136, 136))
    for number, row in enumerate(rows):
        left = 0
        for picture in row:
            whole.paste(picture, (left, number * (max(WINDOWS.values()) + GAP)))
            left += picture.width + GAP
    return whole.quantize(64, dither=Image.Dither.NONE)


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minilm", type=Path)
    model = parser.parse_args().minilm
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        write_web(model, folder / "page")
        zoo.attention_page(model, *TEXTS).write(folder / "attention.html")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=name))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(
            executable_path=find_browser("web-wasm"), headless=True, args=[*FLAGS, "--disable-gpu"]
        )
        host = f"http://127.0.0.1:{server.server_port}"
        for target, use, path in (
            ("web-page.png", use_page, "page/"),
            ("attention.png", use_attention, "attention.html"),
        ):
            whole = screenshots(browser, use, f"{host}/{path}")
            whole.save(TARGET / target, optimize=True)
            light = whole.crop((0, 0, whole.width, max(WINDOWS.values())))
            light.save(TARGET / target.replace(".", "-light."), optimize=True)
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
