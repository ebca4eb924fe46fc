"""What the server loads: `frontend.asgi:app`, made from the environment. The only place of the frontend that reads it."""

from __future__ import annotations

import logging
import os

from frontend.app import create_app
from scheduler.config import Settings

settings = Settings.from_env_or_exit(os.environ)
logging.basicConfig(
    level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
)
app = create_app(settings, multiproc_dir=os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
