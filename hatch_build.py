import shutil
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MapIntoPackage(BuildHookInterface):
    def initialize(self, version, build_data):
        self.temporary = tempfile.TemporaryDirectory()  # hatchling ships a file once, and this one has two places
        boot = shutil.copy(Path(self.root, "mlx_dllm_plugin/_boot.py"), self.temporary.name)
        build_data["force_include"][boot] = "_mlx_dllm_boot.py"
        if version == "standard":  # an editable install reads them from the checkout; copies would go stale
            build_data["force_include"].update({name: f"mlx_dllm_plugin/{name}" for name in ("patches", "compat")})

    def finalize(self, version, build_data, artifact_path):
        self.temporary.cleanup()
