#pragma once

#include <locale.h>

namespace mica::io::detail {

/// While it exists, this thread's C locale is "C". nlohmann's parser calls strtod, and takes only the first byte of the
/// locale's decimal point.
class ClassicLocale {
 public:
  ClassicLocale() : before_(::uselocale(classic())) {}
  ~ClassicLocale() { ::uselocale(before_); }
  ClassicLocale(const ClassicLocale&) = delete;
  ClassicLocale& operator=(const ClassicLocale&) = delete;

 private:
  static locale_t classic() {
    static const locale_t locale = ::newlocale(LC_ALL_MASK, "C", nullptr);
    return locale;
  }

  locale_t before_;
};

}  // namespace mica::io::detail
