# SPDX-License-Identifier: MIT
"""SGLang 0.5.13.post1 registers configuration names that transformers 5.17 has already: harmless with
SGLANG_TF_EXIST_OK set. XPOOL_PEER_SITE: a folder of packages of which one server alone knows; its .pth files act
as in a site-packages folder."""

import os
import site

if os.environ.get("XPOOL_PEER_SITE"):
    site.addsitedir(os.environ["XPOOL_PEER_SITE"])
if os.environ.get("SGLANG_TF_EXIST_OK"):
    from transformers import AutoConfig

    _register = AutoConfig.register
    AutoConfig.register = staticmethod(lambda kind, config, exist_ok=False: _register(kind, config, exist_ok=True))
