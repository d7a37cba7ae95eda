"""The exporter as it runs in a pod, but for where its service account is mounted: the folder that SERVICE_ACCOUNT names."""

import os
import sys
from pathlib import Path

from exporter.__main__ import main
from exporter.sources import kubernetes_config

if __name__ == "__main__":
    kubernetes_config.SERVICE_ACCOUNT = Path(os.environ["SERVICE_ACCOUNT"])
    sys.exit(main())
