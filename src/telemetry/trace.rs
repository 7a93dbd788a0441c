//! Trace context as it comes from clients and goes to engines (W3C, level 1), and
//! which spans are told to a collector.
//!
//! `tracestate` is not passed on: it is a client's text, and a collector or an
//! engine is not for its eyes.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context,
    trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Spans of this target are for a collector only: logs do not show them.
pub(super) const ONLY_TRACED: &str = "berth::trace";

/// Spans of this target are for a collector, and for logs at debug level.
pub(super) const TRACED: &str = "berth::stack";

/// The header of the context.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The context that a client sends, if it is one.
pub(crate) fn parent_of(headers: &HeaderMap) -> Option<Context> {
    let context = parse(headers.get(TRACEPARENT)?.to_str().ok()?)?;
    Some(Context::new().with_remote_span_context(context))
}

/// `version-trace-parent-flags`, all in lower-case hexadecimal digits.
fn parse(text: &str) -> Option<SpanContext> {
    let bytes = text.as_bytes();
    let dashes = [2, 35, 52].iter().all(|at| bytes.get(*at) == Some(&b'-'));
    let digit = |b: &u8| matches!(b, b'0'..=b'9' | b'a'..=b'f' | b'-');
    if !dashes || !bytes.iter().take(55).all(digit) {
        return None;
    }
    let (version, flags) = (text.get(..2)?, text.get(53..55)?);
    // A later version may have more behind another dash.
    match (version, bytes.get(55)) {
        ("00", Some(_)) | ("ff", _) => return None,
        (_, None | Some(b'-')) => {}
        _ => return None,
    }
    let context = SpanContext::new(
        TraceId::from_hex(text.get(3..35)?).ok()?,
        SpanId::from_hex(text.get(36..52)?).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    context.is_valid().then_some(context)
}

/// The context of a span as a header, where a trace is told of it.
pub(super) fn header_of(span: &Span) -> Option<HeaderValue> {
    let context = context_of(span)?;
    let text = format!(
        "00-{}-{}-{:02x}",
        context.trace_id(),
        context.span_id(),
        context.trace_flags().to_u8()
    );
    HeaderValue::try_from(text).ok()
}

/// The id of the trace that this span is in.
pub fn trace_id(span: &Span) -> Option<TraceId> {
    context_of(span).map(|context| context.trace_id())
}

fn context_of(span: &Span) -> Option<SpanContext> {
    if span.is_disabled() {
        return None;
    }
    let context = span.context().span().span_context().clone();
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_taken_only_as_it_is_written() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let context = parse(good).unwrap();
        assert_eq!(
            context.trace_id().to_string(),
            "0af7651916cd43dd8448eb211c80319c"
        );
        assert_eq!(context.span_id().to_string(), "b7ad6b7169203331");
        assert!(context.is_sampled() && context.is_remote());
        assert!(!parse(&good.replace("-01", "-00")).unwrap().is_sampled());
        assert!(parse(&format!("{}-more", good.replace("00-0", "01-0"))).is_some());
        for bad in [
            "",
            "00",
            &good.replace("00-0", "ff-0"),
            &good.replace("af7", "AF7"),
            &good.replace("b7ad6b7169203331", "0000000000000000"),
            &good.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &format!("{good}-more"),
            &good.replace("-01", ""),
            &good.replace('-', "0"),
            &good.replace("0af", "éf"),
        ] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }
}
