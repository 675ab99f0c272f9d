"""Folder of the templates and tables that lie outside the package: docker/, slurm/ and k8s/.

`trainer/templates/` links to them, so that an installed package carries them too.
"""

from pathlib import Path

FOLDER = Path(__file__).parent.parent / "templates"
