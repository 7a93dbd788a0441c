//! The report as a table for a terminal: plain ASCII, no wider than 80 columns
//! unless a name is.

use std::fmt::Write as _;

use super::report::{ArmReport, Report};

const LABEL: usize = 34;
const COLUMN: usize = 13;

/// A time of an arm.
type Seconds = fn(&ArmReport) -> f64;

impl Report {
    /// Both arms side by side, and what affinity changed.
    pub fn table(&self) -> String {
        let mut out = String::new();
        self.head(&mut out);
        let (a, b) = (&self.arms.no_affinity, &self.arms.affinity);

        row(&mut out, "", "no affinity", "affinity", "change");
        line(&mut out);
        row(
            &mut out,
            "reusable-prefix hit rate",
            &percent(a.reusable_prefix_hit_rate),
            &percent(b.reusable_prefix_hit_rate),
            &points(self.absolute_reusable_prefix_hit_rate_lift),
        );
        row(
            &mut out,
            "input cache hit rate, with cold",
            &percent(a.overall_input_cache_hit_rate),
            &percent(b.overall_input_cache_hit_rate),
            &points(self.absolute_overall_input_cache_hit_rate_lift),
        );
        let full = |arm: &ArmReport| format!("{}/{}", arm.full_hit_turns, arm.measured_turns);
        row(
            &mut out,
            "full reusable-prefix hits",
            &full(a),
            &full(b),
            "",
        );
        both(&mut out, "prompt tokens", a, b, |arm| {
            count(arm.all_prompt_tokens)
        });
        both(&mut out, "  of them from the cache", a, b, |arm| {
            count(arm.all_prompt_cache_hit_tokens)
        });
        line(&mut out);
        let times: [(&str, Seconds); 6] = [
            ("mean warm-turn latency", |arm| {
                arm.mean_warm_turn_latency_ms / 1e3
            }),
            ("mean request latency", |arm| {
                arm.mean_request_latency_ms / 1e3
            }),
            ("p50 request latency", |arm| {
                arm.p50_request_latency_ms / 1e3
            }),
            ("p95 request latency", |arm| {
                arm.p95_request_latency_ms / 1e3
            }),
            ("request wall time, summed", |arm| arm.total_wall_seconds),
            ("elapsed", |arm| arm.elapsed_seconds),
        ];
        for (label, of) in times {
            let (without, with) = (of(a), of(b));
            row(
                &mut out,
                label,
                &seconds(without),
                &seconds(with),
                &speedup(without, with),
            );
        }
        line(&mut out);
        both(&mut out, "requests", a, b, |arm| count(arm.requests));
        both(&mut out, "tokens generated", a, b, |arm| {
            count(arm.generated_tokens)
        });
        both(&mut out, "replicas used", a, b, |arm| {
            count(arm.placement.distinct_replicas)
        });
        both(&mut out, "replicas per trajectory, most", a, b, |arm| {
            let each = arm.placement.trajectories.iter();
            count(each.map(|t| t.distinct_replicas).max().unwrap_or(0))
        });
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }

    fn head(&self, out: &mut String) {
        let w = &self.workload;
        let gpus: Vec<String> = self
            .fleet
            .accelerators
            .iter()
            .map(|(name, n)| format!("{n} x {name}"))
            .collect();
        let on = if gpus.is_empty() {
            String::new()
        } else {
            format!(" on {}", gpus.join(", "))
        };
        let (s, verb) = if self.replicas == 1 {
            ("", "serves")
        } else {
            ("s", "serve")
        };
        let _ = writeln!(
            out,
            "{} replica{s} ({} ranks) {verb} {}{on}",
            self.replicas, self.fleet.ranks, self.fleet.model
        );
        let _ = write!(
            out,
            "{} trajectories x {} turns, prompts of {} tokens, {}{} generated",
            w.trajectories,
            w.turns,
            count(u64::from(w.initial_prompt_tokens)),
            if w.ignore_eos { "exactly " } else { "at most " },
            count(u64::from(w.output_tokens)),
        );
        if w.new_tokens_per_turn > 0 {
            let _ = write!(
                out,
                ", {} new a turn",
                count(u64::from(w.new_tokens_per_turn))
            );
        }
        let _ = writeln!(
            out,
            "\nbaseline {}, concurrency {}, seed {}, run {}",
            w.baseline, w.concurrency, w.seed, w.run_id
        );
        if self.time_scale != 1.0 {
            let _ = writeln!(
                out,
                "times are simulated: measured seconds divided by {}",
                self.time_scale
            );
        }
        out.push('\n');
    }
}

fn row(out: &mut String, label: &str, a: &str, b: &str, change: &str) {
    let text = format!("{label:<LABEL$}{a:>COLUMN$}{b:>COLUMN$}  {change:>17}");
    out.push_str(text.trim_end());
    out.push('\n');
}

fn both(
    out: &mut String,
    label: &str,
    a: &ArmReport,
    b: &ArmReport,
    of: impl Fn(&ArmReport) -> String,
) {
    row(out, label, &of(a), &of(b), "");
}

fn line(out: &mut String) {
    out.push_str(&"-".repeat(LABEL + 2 * COLUMN + 2 + 17));
    out.push('\n');
}

/// `0.9129` as `91.29 %`.
pub(super) fn percent(rate: f64) -> String {
    format!("{:.2} %", rate * 100.0)
}

/// A difference of rates: `+65.75 points`.
pub(super) fn points(lift: f64) -> String {
    format!("{:+.2} points", lift * 100.0)
}

/// Seconds to a resolution that suits them.
pub(super) fn seconds(s: f64) -> String {
    if s >= 100.0 {
        format!("{s:.2} s")
    } else if s >= 1.0 {
        format!("{s:.3} s")
    } else {
        format!("{:.2} ms", s * 1e3)
    }
}

/// How many times as fast and how much less: `1.055x, -5.2 %`.
fn speedup(without: f64, with: f64) -> String {
    if without <= 0.0 || with <= 0.0 {
        return String::new();
    }
    format!(
        "{:.3}x, {:+.1} %",
        without / with,
        (with / without - 1.0) * 100.0
    )
}

/// With separators: `188,416`.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::report::tests::sample;

    #[test]
    fn numbers() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1000), "1,000");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(percent(0.912_89), "91.29 %");
        assert_eq!(points(-0.1), "-10.00 points");
        assert_eq!(seconds(148.514), "148.51 s");
        assert_eq!(seconds(4.4031), "4.403 s");
        assert_eq!(seconds(0.0042), "4.20 ms");
        assert_eq!(speedup(148.51, 140.79), "1.055x, -5.2 %");
        assert_eq!(speedup(0.0, 1.0), "");
    }

    #[test]
    fn the_whole_table() {
        let mut report = sample();
        let expected = "\
8 replicas (8 ranks) serve Qwen3-8B on 8 x NVIDIA H100 80GB HBM3
4 trajectories x 8 turns, prompts of 4,096 tokens, exactly 512 generated
baseline random, concurrency 1, seed 0, run test

                                    no affinity     affinity             change
";
        assert!(report.table().starts_with(expected), "{}", report.table());
        for row in [
            "reusable-prefix hit rate                14.29 %     100.00 %      +85.71 points",
            "input cache hit rate, with cold         13.04 %      91.29 %      +78.25 points",
            "full reusable-prefix hits                  4/28        28/28",
            "prompt tokens                           188,416      188,416",
            "mean warm-turn latency                  4.657 s      4.400 s     1.058x, -5.5 %",
            "request wall time, summed              149.20 s     141.80 s     1.052x, -5.0 %",
            "tokens generated                         16,384       16,384",
        ] {
            assert!(
                report.table().lines().any(|line| line == row),
                "{row}\n{}",
                report.table()
            );
        }
        assert!(report.table().lines().all(|l| l.len() <= 80));

        report.time_scale = 0.02;
        report
            .notes
            .push("replica r3 was lost during the run".to_owned());
        let table = report.table();
        assert!(table.contains("times are simulated: measured seconds divided by 0.02"));
        assert!(table.ends_with("note: replica r3 was lost during the run\n"));
    }
}
