"""Settings of stored files, from PENSTOCK_FILES_* variables. All gateways of a Redis need the same ones."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.queue.files.file_records import FileLimits
from penstock.runtime.settings import Settings

DAY_S = 86_400


class FilesSettings(Settings):
    """Where files are stored, how many, and for how long."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_FILES_")

    url: str | None = None
    """Folder, or fsspec URL such as s3://bucket/penstock, that all gateways and workers reach. Default: none; with
    `penstock serve` a folder beside its queue."""
    max_file_mib: int = Field(default=200, ge=1, le=10_240)
    """Largest file in MiB."""
    max_tenant_mib: int = Field(default=10_240, ge=0)
    """Most MiB of all files of a tenant. 0: no limit."""
    max_mib: int = Field(default=102_400, ge=0)
    """Most MiB of all files. 0: no limit."""
    max_tenant_files: int = Field(default=10_000, ge=0)
    """Most files of a tenant. 0: no limit."""
    max_files: int = Field(default=100_000, ge=0)
    """Most files of all tenants. 0: no limit."""
    min_free_mib: int = Field(default=1024, ge=0)
    """MiB that must stay free on the disk of a folder. An upload that would take them is refused."""
    retention_days: float = Field(default=30.0, gt=0, le=3650)
    """Days for which a file is kept if its upload names no `expires_after`, and a batch after its end."""
    min_upload_kib_per_s: float = Field(default=16.0, gt=0)
    """Slowest upload in KiB per second, beyond the first 30 s."""
    max_tenant_uploads: int = Field(default=4, ge=1)
    """Most uploads of a tenant that one gateway receives at once. It receives four times as many in all."""

    max_tenant_batches: int = Field(default=100, ge=0)
    """Most open batches of a tenant. 0: no limit."""
    max_tenant_rows: int = Field(default=2_000_000, ge=0)
    """Most rows of a tenant's open batches that are not answered yet. A further batch waits. 0: no limit."""
    max_batch_rows: int = Field(default=50_000, ge=1)
    """Most rows of a batch."""
    max_batch_inputs: int = Field(default=50_000, ge=1)
    """Most texts of all rows of a batch of embeddings."""

    max_message_batch_rows: int = Field(default=100_000, ge=1)
    """Most requests of a message batch."""
    max_message_batch_mib: int = Field(default=256, ge=1, le=4096)
    """Largest body of a message batch in MiB."""
    message_batch_days: float = Field(default=29.0, gt=0, le=3650)
    """Days after the creation of a message batch for which its results are kept."""

    batch_lease_s: float = Field(default=6.0, ge=1, le=60)
    """Seconds after which another process goes on with a batch whose process is silent."""

    @property
    def max_file_bytes(self) -> int:
        """Largest file in bytes."""
        return self.max_file_mib << 20

    @property
    def retention_ms(self) -> int:
        """Milliseconds for which a file is kept by default."""
        return int(self.retention_days * DAY_S * 1000)

    @property
    def limits(self) -> FileLimits:
        """The limits that hold over all gateways."""
        return FileLimits(self.max_tenant_mib << 20, self.max_mib << 20, self.max_tenant_files, self.max_files)
