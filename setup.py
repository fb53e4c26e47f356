"""Name the packages to install, which pyproject.toml alone cannot say for this layout.

`kernels/`, `patches/` and `launch/` stand at the top of the repository and install as
`sglang_ddtree_patch.kernels` and so on. None of the three may hold an `__init__.py`: Python started in
the repository would then import ours where SGLang and transformers ask for the PyPI package `kernels`.
"""

from setuptools import find_namespace_packages, setup

PACKAGE = "sglang_ddtree_patch"
FOLDERS_BELOW_PACKAGE = ("kernels", "patches", "launch")

packages = [PACKAGE]
# Model folders hold weights and configs, not code: they travel as package data.
packages += [
    f"{PACKAGE}.{name}"
    for name in find_namespace_packages(PACKAGE, exclude=["models", "models.*", "*__pycache__*"])
]
package_dir = {PACKAGE: PACKAGE}
for folder in FOLDERS_BELOW_PACKAGE:
    package_dir[f"{PACKAGE}.{folder}"] = folder
    packages.append(f"{PACKAGE}.{folder}")
    packages += [
        f"{PACKAGE}.{folder}.{name}" for name in find_namespace_packages(folder, exclude=["*__pycache__*"])
    ]

setup(packages=packages, package_dir=package_dir)
