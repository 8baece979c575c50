"""The options of `penstock bench serve`. Their docstrings are its help texts; names are vLLM's where it has them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

SLO_METRICS = ("ttft", "tpot", "e2el")
PLOT_SUFFIXES = (".svg", ".png", ".pdf")
MAX_NUM_PROMPTS = 1_000_000


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerOptions(_Options):
    """The server that gets the requests, and what all requests have in common."""

    base_url: str = "http://127.0.0.1:8000"
    """URL of the server, with or without /v1."""
    model: str | None = None
    """Model to request. Default: the first of /v1/models."""
    endpoint: str = "chat"
    """chat, completions, or a path such as /v1/chat/completions."""
    api_key: str | None = None
    """API key of the server. Default: $OPENAI_API_KEY."""
    header: tuple[str, ...] = ()
    """Header of every request, as NAME=VALUE. Repeat it for several."""
    extra_body: str = "{}"
    """JSON object with more fields of every body."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the server's."""
    ignore_eos: bool = False
    """Ask for answers of exactly the wanted length."""

    @field_validator("header")
    @classmethod
    def _has_names(cls, headers: tuple[str, ...]) -> tuple[str, ...]:
        for header in headers:
            if not header.partition("=")[1] or not header.partition("=")[0].strip():
                raise ValueError(f"{header!r} is not NAME=VALUE")
        return headers

    @field_validator("extra_body")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        return text

    @property
    def body(self) -> dict[str, Any]:
        """Fields of every body beside model, prompt and length."""
        fields: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos else {}
        fields |= {"temperature": self.temperature} if self.temperature is not None else {}
        return fields | dict(json.loads(self.extra_body))


class WorkloadOptions(_Options):
    """The requests of the load, and the times at which they arrive."""

    num_prompts: int | None = Field(default=None, ge=1, le=MAX_NUM_PROMPTS)
    """Number of requests. Default: 100, or all of a trace."""
    request_rate: float = Field(default=math.inf, gt=0)
    """Arrivals per second; inf: all at once."""
    burstiness: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Shape of the gamma distribution of the times between arrivals. 1: a Poisson process; below 1: bursts."""
    trace: Path | None = None
    """Arrivals and lengths from a file: JSON lines (also Mooncake's) or CSV (Azure's, BurstGPT's)."""
    trace_speed: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Replay a trace this many times faster."""
    random_input_len: int = Field(default=256, ge=1)
    """Mean tokens of a prompt."""
    random_output_len: int = Field(default=128, ge=1)
    """Mean tokens of an answer."""
    random_range_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Lengths vary evenly by this share of the mean."""
    random_prefix_len: int = Field(default=0, ge=0)
    """Tokens before each prompt that all prompts share."""
    dataset_path: Path | None = None
    """Prompts from ShareGPT's JSON, or from JSON lines with prompt or messages."""
    dataset_output_len: int | None = Field(default=None, ge=1)
    """Tokens of a dataset's answers. Default: as in the file, else 128."""
    seed: int = 0
    """Equal seeds give equal requests."""


class LimitOptions(_Options):
    """Limits of the load."""

    max_concurrency: int | None = Field(default=None, ge=1)
    """Most open requests; further ones wait. Default: no limit."""
    duration: float | None = Field(default=None, gt=0)
    """Seconds after which no request starts. Default: no limit."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds after which a request fails."""
    num_warmups: int = Field(default=0, ge=0, le=MAX_NUM_PROMPTS)
    """Requests before the load that are not measured."""


class OutputOptions(_Options):
    """The statistics to compute and the files to write."""

    goodput: tuple[str, ...] = ()
    """Count requests within limits in ms, such as ttft:200 tpot:50; also e2el."""
    metric_percentiles: str = "50,90,99"
    """Percentiles to compute."""
    output_json: str | None = None
    """Write the result and each request's measurements to this file; -: print them instead of the table."""
    plot: Path | None = None
    """Draw distributions and a timeline to this .svg or .png file; needs matplotlib (the extra `bench`)."""

    @field_validator("goodput")
    @classmethod
    def _has_limits(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in _split(words):
            metric, _, limit = word.partition(":")
            if metric not in SLO_METRICS or not _number(limit) > 0:
                raise ValueError(f"{word!r} is not METRIC:MS with a METRIC of {', '.join(SLO_METRICS)}")
        return words

    @field_validator("metric_percentiles")
    @classmethod
    def _has_percentiles(cls, text: str) -> str:
        if not all(0 <= _number(word) <= 100 for word in text.split(",")):
            raise ValueError("must be numbers from 0 to 100 with commas between them")
        return text

    @field_validator("plot")
    @classmethod
    def _has_suffix(cls, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in PLOT_SUFFIXES:
            raise ValueError(f"the name must end in {', '.join(PLOT_SUFFIXES)}")
        return path

    @property
    def limits_ms(self) -> dict[str, float]:
        """Metric → limit of the goodput."""
        return {metric: float(limit) for metric, _, limit in (word.partition(":") for word in _split(self.goodput))}

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles as numbers."""
        return tuple(map(float, self.metric_percentiles.split(",")))


def _split(words: tuple[str, ...]) -> list[str]:
    return " ".join(words).replace(",", " ").split()


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan
