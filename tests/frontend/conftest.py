"""Fixtures of the frontend's tests: GPT-2's text model, and an application over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from frontend.app import create_app
from frontend.edge import Edge
from frontend.text import TextModel
from scheduler.config import Settings
from tests.frontend.scripted import ScriptedEngine, card


@pytest.fixture(scope="session", autouse=True)
def text_models() -> Iterator[None]:
    """Each text model is made once for all tests: loading GPT-2's takes longer than most of them."""
    made: dict[str, TextModel] = {}
    from_card = TextModel.from_card

    def cached(values: dict[str, Any]) -> TextModel:
        parts = [values.get(k) for k in ("vocab", "tokens", "chat_template")]
        key = f"{parts} {hash(values.get('tokenizer'))}"
        if key not in made:
            made[key] = from_card(values)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextModel, "from_card", staticmethod(cached))
        yield


@pytest.fixture(scope="session")
def gpt2() -> TextModel:
    return TextModel.from_card(card())


class Answer:
    """What came back for one request."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, its four keys checked."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The JSON of an event stream's frames, the final [DONE] checked and left out."""
        frames = [f for f in self.text.split("\n\n") if f and not f.startswith(":")]
        assert all(frame.startswith("data: ") for frame in frames)
        assert frames[-1] == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


class Site:
    """A running application and its scripted engine; requests are plain ASGI calls, so that a client can leave."""

    def __init__(self, app: Edge, engine: ScriptedEngine) -> None:
        self.app = app
        self.engine = engine

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] = b"",
        headers: dict[str, str] | None = None,
        leaves: asyncio.Event | None = None,
        on_body: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """One exchange. The client goes away when `leaves` is set; `on_body` sees each piece as it is sent."""
        answer, chunks = Answer(), [body] if isinstance(body, bytes) else list(body)
        left = leaves or asyncio.Event()

        async def receive() -> dict[str, Any]:
            if chunks:
                chunk = chunks.pop(0)
                return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
                return
            answer.body += message.get("body", b"")
            if on_body is not None:
                on_body(message.get("body", b""))

        path, _, query = path.partition("?")
        named = {"host": "test", **{k.lower(): v for k, v in (headers or {}).items()}}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in named.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, receive, send)
        return answer

    async def post(self, path: str, body: Any, **named: Any) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **named.pop("headers", {})}
        return await self.request("POST", path, raw, headers, **named)

    async def get(self, path: str, **named: Any) -> Answer:
        return await self.request("GET", path, **named)


@asynccontextmanager
async def serving(
    settings: Settings, card_changes: dict[str, Any], is_loaded: bool
) -> AsyncIterator[Site]:
    made: list[ScriptedEngine] = []

    def make_engine(given: Settings) -> ScriptedEngine:
        made.append(ScriptedEngine(given))
        return made[-1]

    app = create_app(settings, make_engine=make_engine)
    to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    from_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}}
    life = asyncio.create_task(app(scope, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    site = Site(app, made[0])
    if is_loaded:
        site.engine.load(card(**card_changes))
        while (await site.get("/healthz")).status != 200:
            await asyncio.sleep(0.01)
    yield site
    await to_app.put({"type": "lifespan.shutdown"})
    await life


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(run_dir=str(tmp_path))


@pytest.fixture
def play(settings: Settings) -> Callable[..., None]:
    """Runs a coroutine function over a served application, to its end, within a bounded time."""

    def run(
        scenario: Callable[[Site], Coroutine[Any, Any, None]],
        card_changes: dict[str, Any] | None = None,
        *,
        settings: Settings = settings,
        is_loaded: bool = True,
    ) -> None:
        async def main() -> None:
            async with (
                asyncio.timeout(20),
                serving(settings, card_changes or {}, is_loaded) as site,
            ):
                await scenario(site)

        asyncio.run(main())

    return run
