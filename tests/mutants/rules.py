"""Update rules, what they are compiled to, and codecs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "adam-without-bias-correction",
        "daskps.optim.adam:_Moments._moments",
        "size = lr / (1.0 - self.beta1**step)",
        "size = lr / (1.0 - self.beta1 ** (step + 1))",
        (
            "tests/optim/test_rules.py::test_rule_float64_equals_oracle_and_paper[Adam(lr=0.001)]",
        ),
    ),
    Mutant(
        "decay-without-the-learning-rate",
        "daskps.optim.adam:AdamW.prepare",
        "return (*self._moments(step, lr), 1.0 - lr * self.weight_decay)",
        "return (*self._moments(step, lr), 1.0 - self.weight_decay)",
        (
            "tests/optim/test_rules.py::test_rule_float64_equals_oracle_and_paper[AdamW(lr=0.001)]",
        ),
    ),
    Mutant(
        "nesterov-is-momentum",
        "daskps.optim.sgd:_nesterov",
        "return w - lr * (g + momentum * b), b",
        "return w - lr * b, b",
        (
            "tests/optim/test_rules.py::test_rule_float64_equals_oracle_and_paper[SGD(lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1)]",
        ),
    ),
    Mutant(
        "schedule-one-step-late",
        "daskps.optim.base:Rule.scalars",
        'effective = self.rate(step - 1, epoch) if lr is None else in_range("lr", lr)',
        'effective = self.rate(step, epoch) if lr is None else in_range("lr", lr)',
        (
            "tests/optim/test_rules.py"
            "::test_scalars_take_the_schedule_of_the_step_before_or_an_override",
        ),
    ),
    Mutant(
        "scalars-of-the-step-before",
        "daskps.optim.binding:Bound.scalars",
        "if latest is not None and latest[0] == asked:",
        "if latest is not None and latest[0][1] == lr:",
        (
            "tests/optim/test_base.py::test_scalars_are_asked_of_a_rule_once_for_all_its_parameters",
        ),
    ),
    Mutant(
        "first-pattern-does-not-win",
        "daskps.optim.patterns:_match",
        "if (rule := rules[pattern]) is not None:",
        "if (rule := list(rules.values())[-1]) is not None:",
        ("tests/optim/test_patterns.py::test_first_match_in_mapping_order_holds",),
    ),
    Mutant(
        "numbers-of-float32-in-float64",
        "daskps.kernels.freeze:_Patch._number",
        'return f"T({number!r})"',
        'return f"{number!r}"',
        ("tests/kernels/test_freeze.py::test_numbers_take_the_compute_dtype",),
    ),
    Mutant(
        "file-with-another-text-is-run",
        "daskps.kernels.cache:_write",
        "if file.read() == data:",
        "if file.read() or data:",
        (
            "tests/kernels/test_cache.py::test_a_file_with_another_text_is_replaced_not_run",
        ),
    ),
    Mutant(
        "device-fuses-multiply-and-add",
        "daskps.kernels.device.ptx:to_ptx",
        "code = _renamed(code, {**_ROOTS, **library})",
        'code = re.sub(" f(mul|add) ", r" f\\1 contract ", _renamed(code, _ROOTS))',
        ("tests/kernels/device/test_ptx.py::test_a_fused_multiply_is_found",),
    ),
    Mutant(
        "damaged-loop-of-a-device-is-used",
        "daskps.kernels.cache:text_of",
        "if head == _head(text):",
        "if head.startswith(_head(text)[:3]):",
        (
            "tests/kernels/device/test_ptx.py"
            "::test_code_is_kept_and_a_damaged_file_is_made_again",
        ),
    ),
    Mutant(
        "device-loops-are-vectorised",
        "daskps.kernels.device.intrinsics:scalar",
        'builder.function.attributes.add("noimplicitfloat")',
        'builder.function.attributes.add("nounwind")',
        ("tests/kernels/device/test_rows.py::test_every_operation_says_how_it_rounds",),
    ),
    Mutant(
        "updates-of-a-device-go-on-after-a-look",
        "daskps.kernels.device.row_loops:row_loop",
        '"if flag[0] == 0:",',
        '"if True:",',
        (
            "tests/kernels/device/test_rows.py"
            "::test_a_look_at_rows_that_finds_something_leaves_them_and_a_log_of_them[nan]",
        ),
    ),
    Mutant(
        "infinite-word-is-not-told",
        "daskps.kernels.halves:Half.encode",
        "finite &= bool(rounds(bits, found, out[start : start + _BLOCK]))",
        "finite = bool(rounds(bits, found, out[start : start + _BLOCK]))",
        ("tests/kernels/test_bfloat16.py::test_one_bad_element_anywhere_is_told",),
    ),
    Mutant(
        "float64-is-rounded-twice",
        "daskps.kernels.halves:Half.encode",
        "odd(wide, bits)",
        "pass",
        ("tests/kernels/test_bfloat16.py::test_a_float64_is_rounded_once",),
    ),
    Mutant(
        "what-a-lost-push-left-over-is-kept",
        "daskps.cluster.caller.trainer_step:RunCodecs.encoded",
        "return given._replace(words=words, left=left, rows=rows)",
        "self.keep(of := given._replace(words=words, left=left, rows=rows)); return of",
        (
            "tests/training/test_feedback.py"
            "::test_a_push_that_is_refused_or_lost_takes_nothing_of_what_is_left[bsp]",
        ),
    ),
    Mutant(
        "words-that-come-are-not-looked-at",
        "daskps.cluster.protocol.encoding:widened",
        "_check_words(call.parts, codecs.named(call.codec), layout)",
        "assert call.parts",
        (
            "tests/cluster/sockets/test_row_templates.py"
            "::test_a_host_refuses_words_that_do_not_fit",
        ),
    ),
    Mutant(
        "a-codec-says-another-length-each-time",
        "daskps.codecs.base:Codec._encoded",
        "if len(words) != (again := _length(self, len(part))):",
        "if len(words) > (again := _length(self, len(part))):",
        (
            "tests/training/test_bad_codecs.py"
            "::test_what_is_bad_at_the_trainer_changes_nothing[inside-length grows-asp]",
        ),
    ),
)
