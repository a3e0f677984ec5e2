import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(
    r'^__version__ = "(.+)"$',
    (here / "legacy_gradlog" / "__init__.py").read_text(encoding="utf-8"),
    re.MULTILINE,
).group(1)

# A page that has no files beside it, as that of a package index, shows no pictures of
# the repository; the text names them.
readme = (here / "README.rst").read_text(encoding="utf-8")
readme = re.sub(r"(?m)^\.\. image:: docs/.*\n(   :.*\n)*\n", "", readme)

setup(
    name="legacy_gradlog",
    version=version,
    description="The training gradients in TensorBoard, on every Keras and TensorFlow",
    long_description=readme,
    long_description_content_type="text/x-rst",
    license="MIT",
    packages=find_packages(include=["legacy_gradlog", "legacy_gradlog.*"]),
    package_data={"legacy_gradlog": ["data/*"]},
    python_requires=">=3.6",
    install_requires=["numpy", "packaging"],
    entry_points={"console_scripts": ["legacy-gradlog = legacy_gradlog.__main__:main"]},
    extras_require={
        "tf": ["tensorflow", "tensorboard"],
        "plot": ["matplotlib>=3.3"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: MIT License",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
