//! The report as a picture: hit rate and latency per turn, both arms. An SVG
//! that needs nothing else, with its own background, and colours for light and
//! for dark.

use std::fmt::Write as _;

use super::{
    report::{ArmReport, Report, TurnReport},
    table::{count, percent, seconds},
};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 430.0;
const TOP: f64 = 104.0;
const PLOT_WIDTH: f64 = 376.0;
const PLOT_HEIGHT: f64 = 216.0;
const LEFT: [f64; 2] = [76.0, 552.0];
/// Above this many turns the points of a line touch and only blur it.
const MARKERS_UP_TO: usize = 40;

/// Colours that stay apart for colour-blind readers; the lines also differ in
/// dash and marker. The plain rules come first for readers without media
/// queries.
const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;font-size:13px;fill:#1f2328}\
.bg{fill:#ffffff}.title{font-size:17px;font-weight:600}.panel{font-size:14px;font-weight:600}\
.dim{fill:#59636e;font-size:12px}.grid{stroke:#d8dee4;stroke-width:1}.axis{stroke:#59636e;stroke-width:1}\
.without{stroke:#b35900}.with{stroke:#0a58ca}.line{fill:none;stroke-width:2.25;stroke-linejoin:round}\
.line.without{stroke-dasharray:7 4}.dot.without{fill:#b35900;stroke:none}.dot.with{fill:#0a58ca;stroke:none}\
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.bg{fill:#0d1117}.dim{fill:#9198a1}\
.grid{stroke:#30363d}.axis{stroke:#9198a1}.without{stroke:#f0a35e}.with{stroke:#6cb6ff}\
.dot.without{fill:#f0a35e}.dot.with{fill:#6cb6ff}}";

/// The chart of a report as an SVG document.
pub fn svg(report: &Report) -> String {
    let (without, with) = (&report.arms.no_affinity, &report.arms.affinity);
    let title = format!(
        "Cache affinity over {} turns: {} replicas, {} trajectories",
        report.workload.turns, report.replicas, report.workload.trajectories
    );
    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" aria-labelledby=\"title desc\">\n\
         <title id=\"title\">{}</title>\n<desc id=\"desc\">{}</desc>\n<style>{STYLE}</style>\n\
         <rect class=\"bg\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>",
        escape(&title),
        escape(&caption(report).join(" ")),
    );
    text(&mut out, LEFT[0] - 56.0, 32.0, "title", "start", &title);
    legend(&mut out, report);

    let rates = Panel {
        left: LEFT[0],
        title: "Prompt tokens from the cache",
        unit: "%",
        top: 100.0,
        step: 25.0,
        value: |turn| turn.input_cache_hit_rate * 100.0,
    };
    rates.draw(&mut out, without, with);

    let highest = [without, with]
        .into_iter()
        .flat_map(|arm| &arm.turns)
        .map(|turn| turn.mean_request_latency_ms)
        .fold(0.0, f64::max);
    let in_seconds = highest >= 1000.0;
    let (step, top) = scale(if in_seconds { highest / 1e3 } else { highest });
    let latency = Panel {
        left: LEFT[1],
        title: "Mean request latency",
        unit: if in_seconds { "s" } else { "ms" },
        top,
        step,
        value: if in_seconds {
            |turn| turn.mean_request_latency_ms / 1e3
        } else {
            |turn| turn.mean_request_latency_ms
        },
    };
    latency.draw(&mut out, without, with);

    for (line, y) in caption(report).iter().zip([386.0, 404.0, 422.0]) {
        text(&mut out, LEFT[0] - 56.0, y, "dim", "start", line);
    }
    out.push_str("</svg>\n");
    out
}

/// The totals, in at most three lines.
fn caption(report: &Report) -> Vec<String> {
    let (a, b) = (&report.arms.no_affinity, &report.arms.affinity);
    let w = &report.workload;
    let mut lines = vec![
        format!(
            "Reusable-prefix hit rate {} without affinity, {} with; cold turns included {} and {}; \
             full hits {}/{} and {}/{}.",
            percent(a.reusable_prefix_hit_rate),
            percent(b.reusable_prefix_hit_rate),
            percent(a.overall_input_cache_hit_rate),
            percent(b.overall_input_cache_hit_rate),
            a.full_hit_turns,
            a.measured_turns,
            b.full_hit_turns,
            b.measured_turns,
        ),
        format!(
            "Mean warm turn {} and {} ({:.3}x); p95 {} and {}; request wall time {} and {}.",
            seconds(a.mean_warm_turn_latency_ms / 1e3),
            seconds(b.mean_warm_turn_latency_ms / 1e3),
            report.warm_turn_latency_speedup,
            seconds(a.p95_request_latency_ms / 1e3),
            seconds(b.p95_request_latency_ms / 1e3),
            seconds(a.total_wall_seconds),
            seconds(b.total_wall_seconds),
        ),
    ];
    let mut workload = format!(
        "Initial prompts of {} tokens, {} generated a turn, {} in flight at once, run {}.",
        count(u64::from(w.initial_prompt_tokens)),
        count(u64::from(w.output_tokens)),
        w.concurrency,
        w.run_id,
    );
    if report.time_scale != 1.0 {
        let _ = write!(
            workload,
            " Simulated engines: times are measured times over {}.",
            report.time_scale
        );
    }
    lines.push(workload);
    lines
}

fn legend(out: &mut String, report: &Report) {
    let baseline = format!("no affinity ({})", report.workload.baseline);
    let mut x = LEFT[0] - 56.0;
    for (class, label) in [("without", baseline.as_str()), ("with", "affinity")] {
        let y = 54.0;
        let _ = writeln!(
            out,
            "<path class=\"line {class}\" d=\"M{x:.1} {y:.1}h36\"/>"
        );
        marker(out, class, x + 18.0, y);
        text(out, x + 44.0, y + 4.5, "", "start", label);
        x += 236.0;
    }
}

/// One plot: a value from 0 to `top` over the turns.
struct Panel {
    left: f64,
    title: &'static str,
    unit: &'static str,
    top: f64,
    step: f64,
    value: fn(&TurnReport) -> f64,
}

impl Panel {
    fn draw(&self, out: &mut String, without: &ArmReport, with: &ArmReport) {
        let bottom = TOP + PLOT_HEIGHT;
        let right = self.left + PLOT_WIDTH;
        let heading = format!("{} ({})", self.title, self.unit);
        text(
            out,
            self.left - 56.0,
            TOP - 18.0,
            "panel",
            "start",
            &heading,
        );

        let mut tick = 0.0;
        while tick <= self.top + self.step / 2.0 {
            let y = self.y(tick);
            let class = if tick == 0.0 { "axis" } else { "grid" };
            let _ = writeln!(
                out,
                "<path class=\"{class}\" d=\"M{:.1} {y:.1}H{right:.1}\"/>",
                self.left
            );
            let label = tick_label(tick, self.step);
            text(out, self.left - 8.0, y + 4.5, "dim", "end", &label);
            tick += self.step;
        }

        let turns = without.turns.len().max(with.turns.len());
        let every = turns.div_ceil(12).max(1);
        for turn in (0..turns).step_by(every) {
            let label = (turn + 1).to_string();
            text(
                out,
                self.x(turn, turns),
                bottom + 18.0,
                "dim",
                "middle",
                &label,
            );
        }
        text(
            out,
            self.left + PLOT_WIDTH / 2.0,
            bottom + 36.0,
            "dim",
            "middle",
            "turn",
        );

        for (class, arm) in [("without", without), ("with", with)] {
            let points: Vec<(f64, f64)> = arm
                .turns
                .iter()
                .enumerate()
                .map(|(i, turn)| (self.x(i, turns), self.y((self.value)(turn))))
                .collect();
            let path: Vec<String> = points
                .iter()
                .map(|(x, y)| format!("{x:.1} {y:.1}"))
                .collect();
            if !path.is_empty() {
                let _ = writeln!(
                    out,
                    "<path class=\"line {class}\" d=\"M{}\"/>",
                    path.join("L")
                );
            }
            if points.len() <= MARKERS_UP_TO {
                for (x, y) in points {
                    marker(out, class, x, y);
                }
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a number of turns")]
    fn x(&self, index: usize, turns: usize) -> f64 {
        let inset = 14.0;
        let span = PLOT_WIDTH - 2.0 * inset;
        self.left + inset + span * index as f64 / (turns.saturating_sub(1).max(1)) as f64
    }

    fn y(&self, value: f64) -> f64 {
        TOP + PLOT_HEIGHT * (1.0 - value / self.top)
    }
}

fn marker(out: &mut String, class: &str, x: f64, y: f64) {
    let _ = if class == "with" {
        writeln!(
            out,
            "<circle class=\"dot {class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>"
        )
    } else {
        writeln!(
            out,
            "<rect class=\"dot {class}\" x=\"{:.1}\" y=\"{:.1}\" width=\"7\" height=\"7\"/>",
            x - 3.5,
            y - 3.5
        )
    };
}

fn text(out: &mut String, x: f64, y: f64, class: &str, anchor: &str, content: &str) {
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escape(content)
    );
}

/// A round step with three to six of them up to a round top above `highest`.
fn scale(highest: f64) -> (f64, f64) {
    if !(highest.is_finite() && highest > 0.0) {
        return (1.0, 1.0);
    }
    let raw = highest / 5.0;
    let magnitude = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * magnitude)
        .find(|step| *step >= raw)
        .unwrap_or(10.0 * magnitude);
    (step, step * (highest / step).ceil())
}

fn tick_label(value: f64, step: f64) -> String {
    if step >= 1.0 {
        format!("{value:.0}")
    } else if step >= 0.1 {
        format!("{value:.1}")
    } else if step >= 0.01 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

/// For text in XML: a run id or a model's name may hold anything. Characters
/// that XML cannot say at all are left out.
pub(crate) fn escape(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    for c in s.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\t' | '\n' => out.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
