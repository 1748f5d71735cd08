"""Programs that are not one script, or that import and run what lies beside them."""

from .program import Program

SHOW = """
import sys
print(__name__, __package__, __spec__ and __spec__.name, type(__loader__).__name__, __file__, __cached__)
print(sys.argv, sys.path[0], sorted(vars(sys.modules["__main__"])))
"""
BESIDE = {
    "helper.py": 'print("imported", __name__, __file__)\ndef work(): return "worked"\n',
    "parts/__init__.py": "",
    "parts/words.txt": "words\n",
}
IMPORTS = """
import importlib, importlib.resources, pickle
import helper, parts
print(helper.work(), importlib.resources.files("parts").joinpath("words.txt").read_text())
print(pickle.loads(pickle.dumps(helper.work)) is helper.work, importlib.reload(helper) is helper)
"""

OTHERS = {
    "a module": Program(SHOW, "module"),
    "a text": Program('import sys; print(sys.argv, __name__); f = open("a", "w"); f.write("x")', "text"),
    "a module that fails": Program('raise ValueError("in a module")', "module"),
    "a directory": Program(SHOW + IMPORTS, "directory", files=BESIDE),
    "an archive": Program(SHOW + 'raise ValueError("in an archive")', "archive"),
    "bytecode": Program(SHOW, "bytecode"),
    "a link to a script": Program(SHOW + IMPORTS, "link", files=BESIDE),
    "modules beside the script": Program(IMPORTS, files=BESIDE),
    "a module that is called as one of the library": Program(
        "import colorsys, wave; print(colorsys.mine, wave.mine)",
        files={"colorsys.py": "mine = 1", "wave.py": "mine = 2"},
    ),
    "modules that are called as those that are imported": Program(
        """
import json, profile, queue, statistics, tokenize
print(json.mine, profile.mine, queue.mine, statistics.mean([1, 2]), hasattr(tokenize, "mine"))
print(sorted(name for name in __import__("sys").modules if name.startswith(("json", "queue"))))
""",
        files={
            "json/__init__.py": "mine = 1",
            "profile.py": "mine = 2",
            "queue.py": "mine = 3",
            "statistics/readme": "",
        },
    ),
    "other programs, run by runpy": Program(
        """
import runpy
print(sorted(runpy.run_path(os.path.join(os.path.dirname(__file__), "other.py"), run_name="__main__"))[-1])
print(runpy.run_module("helper")["work"]())
print(__name__, __file__)
""",
        files=BESIDE | {"other.py": "import sys\nprint(__name__, __file__, sys.argv)\nzeta = 1\n"},
    ),
    "the program imports itself": Program(
        """
import sys
print("run as", __name__)
import program
print(program is sys.modules["__main__"], program.__name__)
"""
    ),
    "a module of the program that fails, beside modules of its own": Program(
        "import ast\nassert ast.mine == 1\nraise ValueError('no')",
        files={"ast.py": "mine = 1\nopen('imported', 'a').write(__name__)"},
    ),
    "an error beside modules of its own": Program(
        "raise ValueError('no')", files={"ast.py": "open('imported', 'a').write(__name__)"}
    ),
    "a syntax error": Program("print(1)\nif True print(2)\n"),
    "a syntax error in a module": Program("import broken", files={"broken.py": "def f(:\n"}),
    "a module that is not there": Program("import nowhere_at_all"),
}
