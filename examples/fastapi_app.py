"""A FastAPI application that asks penstock: one client for the process, an answer as a whole and as a stream.

`cd examples; uvicorn fastapi_app:app --port 8080` runs it beside `penstock serve`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from penstock import AsyncClient, AsyncJob, PenstockError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Connect once for all requests, and end what is still open when the server stops."""
    async with AsyncClient() as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


class Question(BaseModel):
    text: str = Field(min_length=1, max_length=2000)


async def submitted(request: Request, question: Question) -> AsyncJob:
    """Return the job of a question. A `background` job would go on without its reader, and wait behind other work."""
    client: AsyncClient = request.app.state.client
    messages = [{"role": "user", "content": question.text}]
    return await client.submit(messages, background=False, max_tokens=48, temperature=0)


@app.post("/ask")
async def ask(request: Request, question: Question) -> dict[str, str]:
    result = await (await submitted(request, question)).result(timeout=60)
    return {"text": result.text}


@app.post("/ask/stream")
async def ask_stream(request: Request, question: Question) -> StreamingResponse:
    """Answer with text as it is generated. The job is canceled soon after its caller has gone."""
    job = await submitted(request, question)  # a refusal is raised here, before the answer begins
    return StreamingResponse((chunk.text async for chunk in job.stream()), media_type="text/plain")


@app.exception_handler(PenstockError)
async def refuse(_request: Request, error: PenstockError) -> JSONResponse:
    """Answer as penstock's own gateway would: a full queue is a 429, a pool without nodes a 503."""
    wait_ms = getattr(error, "retry_after_ms", None)
    headers = {} if wait_ms is None else {"Retry-After": str(-(-wait_ms // 1000))}
    return JSONResponse({"error": error.message, "code": error.code}, error.status, headers)
